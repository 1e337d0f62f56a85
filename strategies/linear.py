"""Choose how the matrix products of linear layers read their operands: as torch does, or transposed.

A matrix that is stored row by row is read across its rows in one of its two products, and some BLAS libraries are
slower at that. A route is another way to the same product (``strategies/engine/forward/routed_linear.py``). Names,
shapes and bytes of the model's state do not change, and no weight has a second copy.

Source: "Training System for LLMs Based on Adaptive Transpose on Hygon DCU", Computer Science 53(3), 2026, for choosing
by measurement; the formulation is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.core.facts import Facts, Precision, RunFacts
from deepstow.strategies.core.plan import Decision, Impl, Plan
from deepstow.strategies.core.protocol import BITWISE, Idle, Parity, Phase, Removed, Strategy

if TYPE_CHECKING:
    from torch import nn

_EACH_START = Removed("every start measures for at most 20 s; leave it out")


class Linear(Strategy):
    """Compute the matrix products of linear layers in the way that is fastest with this machine's BLAS library.

    ``adaptive`` measures each product of each shape once, before training starts, and keeps what is faster by more than
    3 %; on many machines that is nothing, and nothing is changed then.
    """

    phase = Phase.HOW
    resume = "said"
    examples = ({"transpose": "flip"},)
    removed = {
        ("transpose", "minimal"): Removed("it made a step 7 to 22 % longer; write adaptive"),
        ("budget_s", None): _EACH_START,
        ("cache", None): _EACH_START,
    }

    transpose: Literal["native", "flip", "left", "right", "adaptive"] = Field(
        default="adaptive",
        description="native: as torch does; flip: the transposed product, transposed back; left, right: that operand "
        "is transposed in memory first; adaptive: for each product the fastest by measurement.",
    )

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit if native; other routes let the BLAS library sum in another order."""
        if self.transpose == "native":
            return BITWISE
        tolerance = 1e-4 if run.precision is Precision.FP32 else 2e-2
        return Parity(tolerance, "the BLAS library sums products of other operand layouts in another order")

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if self.transpose == "native":
            raise Idle("transpose: native leaves every layer as it is")
        reason = "the fastest, measured at the start" if self.transpose == "adaptive" else "as the config says"
        for unit in facts.units:
            yield Impl(unit=unit.name, reason=reason, implementation=self.transpose)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        if self.transpose == "native":
            return
        from deepstow.strategies.engine.forward import routed_linear

        layers = routed_linear.layers_of(model)
        if self.transpose == "adaptive":
            chosen = routed_linear.measured(layers, plan.facts.run)
        else:
            chosen = dict.fromkeys(layers, routed_linear.Routes(*[self.transpose] * 3))
        routed_linear.route(model, chosen)
        log_applied("linear", ((path, str(routes)) for path, routes in chosen.items()))
