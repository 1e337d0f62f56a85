"""Recompute: what forward keeps for backward. Tensors that are large and cheap are recomputed instead.

Arithmetic, bytes per block for b rows of s tokens, width h, a heads (g of keys), MLP width f, 2-byte numbers:
                 explicit attention, GELU, dropout    fused attention, RMSNorm, SwiGLU (each fused)
    none         34 sbh + 5 a s^2 b                   (12 + 4 g/a) sbh + 6 sbf + 4 asb
    selective    about 22 sbh                         (8 + 4 g/a) sbh + 4 sbf + 4 asb
    full         2 sbh                                2 sbh
Hugging Face's own layers fuse little and save more; the plan counts them as they are (``trainer/model/counting.py``).
While a block runs again, all that it saves is there once.

What a recomputed block keeps may wait on the host. What else autograd saves is never sent there: it comes from
operators that read and write the device's memory a few times, which is faster than any link.

Invariant. Recomputed tensors are bit for bit the same: the same kernels on the same inputs and random numbers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from deepstow.strategies.core.facts import Facts, Rates, RunFacts, UnitKind
from deepstow.strategies.core.plan import Decision, Plan, Tier
from deepstow.strategies.core.protocol import FitOptions, Idle, Phase, Refusal, Strategy
from deepstow.strategies.planner.activation_policy import (
    AUTO,
    KeepOption,
    by_policy,
    cheapest,
    keep_all,
    last_block,
    within_host,
)
from deepstow.strategies.planner.budget import device_budget
from deepstow.strategies.planner.keep_or_offload import keep_costs
from deepstow.strategies.planner.step_cost import empty, seconds_of

if TYPE_CHECKING:
    from torch import nn

WHY = {
    "none": "all kept",
    "selective": "products and attention kept, the rest recomputed",
    "full": "the input kept, all recomputed",
    AUTO: "the cheapest per byte is recomputed",
}
KEY = "strategies.recompute"


class Recompute(Strategy):
    """Keep less of each block for backward and recompute the rest. Gradients are bit for bit the same.

    ``selective`` frees most of the memory for little time; ``full`` keeps the blocks' inputs only; ``auto`` recomputes
    as much as it takes to fit, first blocks first; together with ``offload`` it chooses the faster of both.
    """

    phase = Phase.KEEP
    resume = "said"
    fit = FitOptions({"policy": AUTO})
    examples = (
        {"policy": "full", "every": 2},
        {"policy": "selective"},
        {"policy": "full", "activation_offloading": True},
    )

    policy: Literal["none", "selective", "full", "auto"] = Field(
        default="selective",
        description="none: all is kept; selective: products with weights and the result of attention are; full: the "
        "block's input; auto: as much as fits.",
    )
    every: int = Field(default=1, ge=1, description="Recompute every n-th block only, from the first.")
    activation_offloading: bool | Literal["auto"] = Field(
        default="auto",
        description="What recomputed blocks keep waits in pinned host memory: true, always; auto: with policy: auto, "
        "where the link is simulated to have room.",
    )

    def refusals(self, run: RunFacts) -> Iterator[Refusal]:
        if self.policy == AUTO and self.every > 1:
            yield Refusal(f"{KEY}.every", self.every, "auto chooses the blocks itself; leave it out")

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if self.policy == "none":
            raise Idle("policy: none keeps everything")
        blocks = [unit for unit in facts.units if unit.kind is UnitKind.BLOCK]
        if not any(unit.choices for unit in blocks):
            raise Idle("no block saves anything that could be recomputed")
        if self.activation_offloading is True and not any(
            unit.choices and unit.choices.stream_bytes for unit in blocks
        ):
            cure = "blocks of this model are not given their hidden states as first argument; leave it out"
            raise Refusal(f"{KEY}.activation_offloading", True, cure)
        is_open = self.policy == AUTO
        options = self._fitting(facts, plan) if is_open else self._fixed(facts)
        for unit, option in zip(facts.units, options, strict=True):
            if unit.kind is UnitKind.BLOCK:
                reason = WHY[option.policy] + (", what is kept waits on the host" if option.hosted else "")
                may_host = is_open and self._may_host(facts)
                yield option.keep(unit.name, reason, is_open=is_open, may_host=may_host)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        from deepstow.strategies.engine.forward.checkpointing import recompute

        recompute(model, plan)

    def _may_host(self, facts: Facts) -> bool:
        """Stages of a pipeline have several micro-batches under way, and the host's room is for one."""
        return self.activation_offloading is not False and facts.run.stages == 1

    def _fixed(self, facts: Facts) -> Sequence[KeepOption]:
        blocks = [unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK]
        chosen, last = set(blocks[:: self.every]), last_block(facts.units)
        return [
            by_policy(unit, self.policy, hosts=self.activation_offloading is True and index < last)
            if unit.name in chosen
            else keep_all(unit)
            for index, unit in enumerate(facts.units)
        ]

    def _fitting(self, facts: Facts, plan: Plan) -> Sequence[KeepOption]:
        """The options that fit without offloading; with known rates the fastest of them, by simulation: only saved
        tensors cross the link. ``strategies.offload`` decides again.
        """
        machine, budget = facts.machine, device_budget(facts.machine)
        rates = machine.rates if machine.has_accelerator and facts.run.forward_flops else None
        device_peak = plan.peak_with(Tier.DEVICE)

        def peak(options: Sequence[KeepOption]) -> int:
            return device_peak([option.saved for option in options])

        def seconds(options: Sequence[KeepOption], rates: Rates) -> float:
            pairs = zip(facts.units, options, strict=True)
            blocks = ((unit.name, option) for unit, option in pairs if unit.kind is UnitKind.BLOCK)
            kept = plan.amend((option.keep(name, "") for name, option in blocks), by="recompute").facts_as_kept()
            return seconds_of(kept, empty(kept), rates)

        spare = machine.host_bytes - plan.peak(Tier.HOST)
        costs = keep_costs(facts, rates, may_host=self._may_host(facts))
        units = plan.units()
        tried = [cheapest(units, within_host(units, cost, spare), peak, budget) for cost in costs]
        fitting = [options for options in tried if peak(options) <= budget]
        if rates is None or not fitting:
            return min(fitting or tried, key=peak)
        return min(fitting, key=lambda options: seconds(options, rates))
