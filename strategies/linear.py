"""Choose how the matrix products of linear layers are computed.

Each product reads an operand across its rows (``strategies/core/linears.py``), and some BLAS libraries are slower at
that. Names, shapes and bytes of the model's state do not change. Refused: second copies of weights that are split or
moved.

Source: "Training System for LLMs Based on Adaptive Transpose on Hygon DCU", Computer Science 53(3), 2026, for choosing
by measurement; the formulation is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.core.facts import Facts, Precision, RunFacts
from deepstow.strategies.core.linears import ELEMENT_BYTES, NATIVE, Route, Routes
from deepstow.strategies.core.plan import RUN, Decision, Impl, Plan, Reserve
from deepstow.strategies.core.protocol import BITWISE, COMPILING, Idle, Parity, Phase, Requirement, Strategy
from deepstow.strategies.planner import gemm_routes

if TYPE_CHECKING:
    from torch import nn


class Linear(Strategy):
    """Compute the matrix products of linear layers in the way that is fastest with this machine's BLAS library.

    ``adaptive`` measures every shape once, before training starts, and keeps what is faster by at least 3 %; on many
    machines that is nothing, and nothing is changed then. ``minimal`` measures nothing and transposes each weight once
    per optimizer step instead of once per product. Both may keep a second copy of weights, which the plan shows.
    """

    phase = Phase.HOW
    requires = frozenset([Requirement.LINEARS])
    excludes = dict.fromkeys(COMPILING, "strategies.linear already decides how matrix products are taken")
    examples = ({"transpose": "minimal"},)

    transpose: Literal["native", "minimal", "adaptive"] = Field(
        default="adaptive",
        description="native: as torch does; minimal: with the fewest transposed operands; adaptive: the fastest by "
        "measurement.",
    )
    budget_s: Annotated[float, Field(gt=0)] = Field(
        default=20.0, description="Seconds that adaptive may measure; shapes that it does not reach stay native."
    )
    cache: str | None = Field(
        default=None,
        description="File with the measurements of earlier runs; not set means ~/.cache/deepstow/linear.json.",
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
        if not facts.linears:
            raise Idle("the model has no linear layers that could be changed")
        minimal, accumulation, copied = self.transpose == "minimal", facts.run.accumulation, 0
        if minimal and facts.no_copies:
            raise Idle(f"minimal keeps second copies of weights, and {facts.no_copies}")
        changed: dict[str, list[tuple[str, Routes]]] = {}
        for layer in facts.linears:
            shape, routes = layer.shape, NATIVE
            if minimal:
                routes = gemm_routes.minimal(layer, accumulation)
            elif timing := facts.timings.get(str(shape)):
                routes = gemm_routes.fastest(layer, accumulation, timing, copies=not facts.no_copies)
            if routes != NATIVE:
                changed.setdefault(layer.unit, []).append((layer.name, routes))
                copied += (Route.COPY in routes) * shape.inputs * shape.outputs * ELEMENT_BYTES[shape.dtype]
        if not changed:
            raise Idle(self._why_native(facts))
        reason = "fewest transposed bytes" if minimal else "fastest, measured"
        for unit, layers in changed.items():
            yield Impl(unit=unit, reason=reason, implementation=self.transpose, routes=tuple(layers))
        if copied:
            yield Reserve(unit=RUN, reason="weights, turned", owner="linear: second weight copies", num_bytes=copied)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        if chosen := gemm_routes.chosen(plan):
            from deepstow.strategies.engine.forward.routed_linear import route

            route(model, chosen)
            log_applied("linear", ((path, str(routes)) for path, routes in chosen.items()))

    def gemm_timing(self) -> tuple[float, str | None] | None:
        return (self.budget_s, self.cache) if self.transpose == "adaptive" else None

    def _why_native(self, facts: Facts) -> str:
        if self.transpose == "minimal":
            return "no copy would be read more often than written; accumulation, recomputing or freezing change that"
        shapes = len(gemm_routes.shapes_of(facts))
        if missing := shapes - len(facts.timings):
            others = "the others are fastest as they are"
            return f"{missing} of {shapes} shapes are not measured yet, {others}; training measures first"
        return f"all {shapes} shapes are fastest as they are (measured)"
