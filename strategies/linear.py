"""Linear: how a linear layer's matrix products are taken.

Problem. A linear layer takes three matrix products per micro-batch, and one or two operands of each are read across
their rows. Some BLAS libraries are a quarter slower at that, others not at all.

Arithmetic. One more copy of the weight, turned, removes the weight from that list: |W| bytes more, written once per
optimizer step, against |W| bytes read across per micro-batch. Turning an activation first pays from
``outputs > bytes x R_t R_n / (B (R_n - R_t))`` on, with R the flop/s with and without the bad flag and B the copy
bandwidth: a library that loses 10 % at 700 Tflop/s needs 5,000 outputs, one that loses 2 % needs 27,000.

Invariant. Names, shapes and bytes of the model's state stay as they were; a layer whose products all go the native way
is not touched at all, so that "native wins" costs nothing. The copy carries a stamp of the weight that it was made of,
and is never used for another. Evaluation reads the weight itself.

Refused: the second copy where weights are split (ZeRO stage 3) or travel (offload), since it would hold whole what
those have sent away; weights stored turned (checkpoints, flat buckets and ZeRO count on the parameter's own order); a
gradient that forward has written turned (norms and attention would have to follow).

Source: the idea of choosing by measurement is that of "Training System for LLMs Based on Adaptive Transpose on Hygon
DCU", Computer Science 53(3), 2026; the formulation is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from strategies.core.facts import Facts, Precision, RunFacts
from strategies.core.linears import Linear as Layer
from strategies.core.linears import Routes
from strategies.core.plan import RUN, Decision, Impl, Plan, Reserve
from strategies.core.protocol import BITWISE, GemmTiming, Idle, Need, Parity, Phase, Strategy
from strategies.planner import gemm_routes

if TYPE_CHECKING:
    from torch import nn

_ORDER = "products of operands that lie otherwise are summed in another order by the BLAS"


class Linear(Strategy):
    """Take the matrix products of linear layers the way that this machine's BLAS likes best.

    ``adaptive`` measures every shape once, before training starts, and keeps what is faster by at least 3 %; on many
    machines that is nothing, and nothing is changed then. ``minimal`` measures nothing and turns each weight once per
    optimizer step instead of once per product. Both may keep a second copy of weights, which the plan shows.
    """

    phase = Phase.HOW
    requires = frozenset([Need.LINEARS])
    excludes = {"training.torch_compile": "strategies.linear already decides how matrix products are taken"}
    examples = ({"transpose": "minimal"},)

    transpose: Literal["native", "minimal", "adaptive"] = Field(
        default="adaptive",
        description="native: as torch does; minimal: as few transposed operands as there can be; adaptive: the fastest "
        "of all, by measurement.",
    )
    budget_s: Annotated[float, Field(gt=0)] = Field(
        default=20.0, description="Seconds that adaptive may measure; shapes that it does not reach stay native."
    )
    cache: str | None = Field(
        default=None,
        description="File that remembers what was measured; not set means ~/.cache/deepstow/linear.json.",
    )

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit natively; otherwise the BLAS may sum in another order."""
        if self.transpose == "native":
            return BITWISE
        return Parity(1e-4 if run.precision is Precision.FP32 else 2e-2, _ORDER)

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if self.transpose == "native":
            raise Idle("transpose: native leaves every layer as it is")
        if not facts.linears:
            raise Idle("the model has no linear layers that could be changed")
        if self.transpose == "minimal" and facts.no_copies:
            raise Idle(f"minimal keeps second copies of weights, and {facts.no_copies}")
        decided = {layer: self._routes(facts, layer) for layer in facts.linears}
        other = [layer for layer in facts.linears if not decided[layer].native]
        if not other:
            raise Idle(self._why_not(facts))
        reason = "fewest transposed bytes" if self.transpose == "minimal" else "fastest, measured"
        for unit in dict.fromkeys(layer.unit for layer in other):
            mine = tuple((layer.name, decided[layer]) for layer in other if layer.unit == unit)
            yield Impl(unit=unit, reason=reason, implementation=self.transpose, routes=mine)
        copied = sum(layer.shape.weight_bytes for layer in other if decided[layer].copies)
        if copied:
            yield Reserve(unit=RUN, reason="weights, turned", owner="linear: second weight copies", num_bytes=copied)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        """Give the layers that do not stay as they are their routes."""
        if chosen := gemm_routes.chosen(plan):
            from strategies.engine.routed_linear import route

            route(model, chosen)

    def gemm_timing(self) -> GemmTiming | None:
        return GemmTiming(self.budget_s, self.cache) if self.transpose == "adaptive" else None

    def _routes(self, facts: Facts, layer: Layer) -> Routes:
        if self.transpose == "minimal":
            return gemm_routes.minimal(layer, facts.run.accumulation)
        timed = next((timed for timed in facts.timings if timed.shape == layer.shape), None)
        if timed is None:
            return Routes()
        return gemm_routes.fastest(layer, facts.run.accumulation, timed, copies=not facts.no_copies).routes

    def _why_not(self, facts: Facts) -> str:
        if self.transpose == "minimal":
            return "no copy would be read more often than written; accumulation, recomputing or freezing change that"
        shapes, missing = gemm_routes.shapes_of(facts), gemm_routes.unmeasured(facts)
        if missing:
            return (
                f"{len(missing)} of {len(shapes)} shapes are not measured yet, the others are fastest as they are; "
                f"training measures first"
            )
        return f"all {len(shapes)} shapes are fastest as they are (measured)"
