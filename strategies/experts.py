"""Experts: the expert layers of a mixture are divided over ranks, each of which has rows of its own.

For P parameters of which E are experts', and degree N, a rank holds P - E + E / N weights, and with them gradients and
optimizer state. A row is sent to the ranks that have its experts, and its results come back: of T tokens with K experts
each, (N - 1) / N of T K rows in each direction, in forward and in backward, whatever N is.

Invariant. Ranks have other rows, as data ranks have, and no row is dropped. The result is that of the same ranks
without ``experts`` but for rounding: an expert's products take the rows of all ranks at once, and so does the gradient
of its weights. The number of slices changes no bit.

How rows travel is said in ``strategies/parallel/expert_exchange.py``, how gradients and norms are put together in
``expert_parts.py``. Beside ZeRO 1 and 2, ranks with the same experts share their state, all ranks that of the rest.
What is refused, and why: docs/strategies/experts.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from deepstow.strategies.core.facts import EXPERT, Facts, Param, Precision, RunFacts
from deepstow.strategies.core.plan import RUN, Decision, Plan, Reserve
from deepstow.strategies.core.protocol import (
    Axis,
    Parity,
    Phase,
    Refusal,
    Requirement,
    Strategy,
    compared_with,
)
from deepstow.strategies.parallel import deepspeed
from deepstow.strategies.planner.overlap import Exchanges, exchanges_of

if TYPE_CHECKING:
    from torch import nn

KEY = "strategies.experts.degree"
# Architectures that train as without it (tests/parity/test_experts.py), by Hugging Face's model_type.
MODELS = ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # keys of Hugging Face's configs
_SUMS = "an expert's products take the rows of all ranks at once, plain training those of one, and Adam enlarges that"
_ROUNDING = "results of experts are rounded to 16 bits before they are added up"


class Experts(Strategy):
    """Divide the experts of every layer over ``degree`` ranks, which send each other the rows that belong to them.

    For mixtures of experts whose experts do not fit one device. Each rank trains on rows of its own; further ranks hold
    the same experts again. Ranks wait for the one that has the busiest experts (``experts_busiest`` in the log).
    """

    phase = Phase.WHO
    resume = "said"
    requires = frozenset([Requirement.PARAMETERS])
    examples = ({"degree": 2, "slices": 2}, {"degree": 2})

    degree: int = Field(ge=2, description="Ranks that have all experts of a layer together.")
    slices: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Parts of a layer's exchange, of which one travels while another is computed."
    )

    def parity(self, run: RunFacts) -> Parity:
        if run.precision is not Precision.FP32:
            return Parity(2e-2, _ROUNDING)
        return Parity(1e-5 if run.optim == "sgd" else 2e-2, _SUMS)

    def divides(self) -> Mapping[Axis, int]:
        return {Axis.EXPERTS: self.degree}

    def check_installed(self) -> None:
        """Older releases of Transformers scale losses otherwise."""
        compared_with(KEY, self.degree, "transformers", (5, 23))

    def refusals(self, run: RunFacts) -> Iterator[Refusal]:
        if run.world_size % self.degree:
            below = run.world_size // self.degree * self.degree
            fits = " or ".join(str(count) for count in (below, below + self.degree) if count)
            yield Refusal(KEY, self.degree, f"ranks must be a multiple of it: start {fits}, not {run.world_size}")

    def refuses_model(self, model: Mapping[str, Any]) -> Iterator[Refusal]:
        kind, count = model.get("model_type"), next((n for key in COUNTS if isinstance(n := model.get(key), int)), 0)
        if kind not in MODELS:
            why = f"{kind} has no experts" if not count else f"{kind} was not compared with training on one process"
            yield Refusal(KEY, self.degree, f"{why}; architectures that can be divided: {', '.join(MODELS)}")
        elif count % self.degree:
            fits = [str(degree) for degree in range(2, count + 1) if count % degree == 0]
            yield Refusal(KEY, self.degree, f"must divide the number of experts, {count}: write {' or '.join(fits)}")
        elif self.slices != "auto" and self.slices > count // self.degree:
            most = count // self.degree
            yield Refusal("strategies.experts.slices", self.slices, f"a rank has {most} experts: write {most} or less")

    def narrowed(self, facts: Facts, rank: int) -> Facts:
        """The facts of a rank that has its part of the experts."""
        params = tuple(self._mine(param) for param in facts.params)
        gone = {unit.name: 0 for unit in facts.units}
        for whole, mine in zip(facts.params, params, strict=True):
            gone[whole.unit] += whole.num_elements - mine.num_elements
        if not any(gone.values()):
            raise Refusal(KEY, self.degree, "the model has no layers with experts; leave strategies.experts out")
        units = (
            replace(unit, num_params=unit.num_params - less, num_trainable=max(0, unit.num_trainable - less))
            for unit, less in zip(facts.units, gone.values(), strict=True)
        )
        apart = sum(param.num_elements for param in params if EXPERT.search(param.name) and param.group is not None)
        alike = facts.run.copies // self.degree
        run = replace(facts.run, model_params=facts.num_params, apart=apart, alike=alike)
        return replace(facts, units=tuple(units), params=params, run=run)

    def _mine(self, param: Param) -> Param:
        return replace(param, num_elements=param.num_elements // (self.degree if EXPERT.search(param.name) else 1))

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        exchanges = self._exchanges(facts)
        yield Reserve(
            unit=RUN,
            reason=exchanges.words,
            owner="experts: exchanged rows",
            num_bytes=2 * exchanges.num_bytes,
            in_passes=True,
        )

    def _exchanges(self, facts: Facts) -> Exchanges:
        experts = [param for param in facts.params if EXPERT.search(param.name)]
        return exchanges_of(facts, experts, self.degree, None if self.slices == "auto" else self.slices)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        from deepstow.strategies.parallel.expert_parts import ExpertParts

        zero = deepspeed.stage(plan) is not None
        ExpertParts(model, self.degree, self._exchanges(plan.facts).slices, zero=zero)
