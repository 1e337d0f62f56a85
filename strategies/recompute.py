"""Recompute: what forward keeps for backward. What is large and cheap is made again instead.

Problem. Autograd keeps what every operator needs for its gradient: tens of times a block's input, for every block,
until backward comes. Most of it is made from little by little work.

Arithmetic, bytes per block for b rows of s tokens, width h, a heads (g of keys), MLP width f, 2-byte numbers:
                 explicit attention, GELU, dropout    fused attention, RMSNorm, SwiGLU (each fused)
    none         34 sbh + 5 a s^2 b                   (12 + 4 g/a) sbh + 6 sbf + 4 asb
    selective    about 22 sbh                         (8 + 4 g/a) sbh + 4 sbf + 4 asb
    full         2 sbh                                2 sbh
    again        selective: scores, softmax, dropout, norms, activation functions, gates; full: all of the forward
Hugging Face's own layers fuse little and save more; the plan counts them as they are (``trainer/model/counting.py``).
While a block runs again, all that it saves is there once.

What a recomputed block keeps may wait on the host from forward to backward: its bytes leave the device, but for two
blocks at a time on their way, and cross the link twice per micro-batch. What else autograd saves is never sent there:
it is made by operators that read and write the device's memory a few times, which is faster than any link.

Invariant. What is made again has the bits it had: the same kernels on the same inputs, with the same random numbers.

Refused: choosing blocks twice (``every`` with ``auto``), and sending to the host where nothing is recomputed or where
``auto`` weighs it. Recomputing where nothing is freed is left out.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from strategies.core.facts import Facts, RunFacts, UnitKind
from strategies.core.plan import Decision, Home, Plan
from strategies.core.protocol import BITWISE, Idle, Parity, Phase, Refusal, Strategy
from strategies.core.sizes import SHARE
from strategies.planner.activation_policy import AUTO, Way, by_policy, cheapest, everything, last_block, within_host
from strategies.planner.keep_or_offload import all_prices
from strategies.planner.step_cost import alone

if TYPE_CHECKING:
    from torch import nn

WHY = {
    "none": "all kept",
    "selective": "products and attention kept, the rest made again",
    "full": "the input kept, all made again",
    AUTO: "what pays the least per byte is made again",
}
KEY = "strategies.recompute"


class Recompute(Strategy):
    """Keep less of each block for backward and run the rest of its forward again. Gradients are the same bits.

    ``selective`` frees most of the memory for little time; ``full`` keeps the blocks' inputs only; ``auto`` recomputes
    as much as memory asks for, first blocks first, and together with ``offload`` takes the faster of both ways to fit.
    """

    phase = Phase.KEEP
    excludes = dict.fromkeys(
        ("training.gradient_checkpointing", "training.activation_checkpointing"),
        "strategies.recompute already decides what is kept",
    )
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

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit: the same kernels run on the same inputs."""
        return BITWISE

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if self.policy == AUTO and self.every > 1:
            raise Refusal(f"{KEY}.every", self.every, "auto chooses the blocks itself; leave it out")
        if self.activation_offloading is True and self.policy in ("none", AUTO):
            cure = (
                "it weighs that itself; write auto" if self.policy == AUTO else "it keeps all; write selective or full"
            )
            raise Refusal(f"{KEY}.activation_offloading", True, f"policy is {self.policy}: {cure}")
        if self.policy == "none":
            raise Idle("policy: none keeps everything")
        blocks = [unit for unit in facts.units if unit.kind is UnitKind.BLOCK]
        if not any(unit.choices for unit in blocks):
            raise Idle("no block saves anything that could be made again")
        if self.activation_offloading is True and not any(
            unit.choices and unit.choices.stream_bytes for unit in blocks
        ):
            cure = "blocks of this model are not given their hidden states as first argument; leave it out"
            raise Refusal(f"{KEY}.activation_offloading", True, cure)
        ways = self._fitting(facts, plan) if self.policy == AUTO else self._fixed(facts)
        is_open = self.policy == AUTO
        for unit, way in zip(facts.units, ways, strict=True):
            if unit.kind is UnitKind.BLOCK:
                yield way.keep(unit.name, _why(way), is_open=is_open, may_host=is_open and self._may_host)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        """A checkpoint in place of the forward of each block that is recomputed."""
        from strategies.engine.checkpointing import recompute

        recompute(model, plan)

    def repeats_products(self) -> bool:
        return self.policy == "full" and self.every == 1

    def _fixed(self, facts: Facts) -> Sequence[Way]:
        blocks = [unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK]
        chosen, last = set(blocks[:: self.every]), last_block(facts.units)
        return [
            by_policy(unit, self.policy, hosts=self.activation_offloading is True and index < last)
            if unit.name in chosen
            else everything(unit)
            for index, unit in enumerate(facts.units)
        ]

    @property
    def _may_host(self) -> bool:
        return self.activation_offloading is not False

    def _fitting(self, facts: Facts, plan: Plan) -> Sequence[Way]:
        """As if nothing were offloaded; a strategy that offloads decides again.

        With known rates the fastest of what fits, by the simulator: nothing but saved tensors crosses the link.
        """
        machine = facts.machine
        budget = int(SHARE * machine.device_bytes) if machine.has_accelerator else machine.device_bytes
        rates = machine.rates if machine.has_accelerator and facts.run.forward_flops else None
        device_peak = plan.device_peak()

        def peak(ways: Sequence[Way]) -> int:
            return device_peak([way.saved for way in ways])

        def kept(ways: Sequence[Way]) -> Plan:
            pairs = zip(facts.units, ways, strict=True)
            return plan.amend((way.keep(unit.name, "") for unit, way in pairs), by="recompute")

        spare = machine.host_bytes - plan.peak(Home.HOST)
        prices = all_prices(facts, rates, may_host=self._may_host)
        tried = [cheapest(facts.units, within_host(facts.units, each, spare), peak, budget) for each in prices]
        fitting = [ways for ways in tried if peak(ways) <= budget]
        if rates is None or not fitting:
            return min(fitting or tried, key=peak)
        return min(fitting, key=lambda ways: alone(kept(ways).facts_as_kept(), rates))


def _why(way: Way) -> str:
    return WHY[way.policy] + (", what is kept waits on the host" if way.hosted else "")
