"""Collectives: ranks of several machines exchange inside their machines first, then across, in slices that overlap.

For W bytes on M machines with g ranks each, a rank sends 2 (M-1)/M W/g to other machines for an all-reduce. A ring of
all N ranks sends 2 (N-1)/N W/g, and the straight exchange of the memory engine (N-g)/N W, which is g times as much.

Invariant. Ranks of a machine are added in their order, then machines in theirs, ((r0 + r1) + (r2 + r3)), whatever the
number of slices; all ranks end with the same bits. Rings add more than two ranks in an order of their own.

How they exchange is said in ``strategies/engine/ranks/two_level.py``, what it takes in
``strategies/planner/two_level.py``. Who exchanges: torch's DistributedDataParallel by a communication hook, DeepSpeed's
stage 0 between its backward and its step (``strategies/backends/two_level.py``), and the memory engine. Refused: what
exchanges otherwise, such as DeepSpeed's other stages, and machines with different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from strategies.core.facts import Facts, Precision, RunFacts
from strategies.core.plan import RUN, Decision, Plan, Reserve
from strategies.core.protocol import BITWISE, Idle, Parity, Phase, Refusal, Strategy
from strategies.core.sizes import human
from strategies.planner.pipeline_bytes import MESSAGE_BYTES
from strategies.planner.two_level import SLICES, UNKNOWN, machines_of

KEY = "strategies.collectives.hierarchical"
_ORDER = (
    "gradients of more than two ranks are added in another order than by plain data parallelism; where those of an "
    "element cancel, Adam moves it by the learning rate in either direction"
)
_ROUNDING = "beside strategies.offload or zero weights are rounded to 16 bits where plain training autocasts fp32"
_OTHERS: Mapping[str, str] = {
    "tensor": "DeepSpeed's engine exchanges inside layers itself",
    "pipeline": "its stages add up gradients in groups of their own",
    "sequence": "it has not been compared with rows whose parts are on several ranks",
    "experts": "their gradients are added up in groups of their own",
}


class Collectives(Strategy):
    """Exchange gradients, and the memory engine's spans, inside each machine first and then across machines.

    For several machines with several ranks each, whose network is slower than what is inside them. Machines are those
    of the launcher, and need as many ranks each.
    """

    phase = Phase.WHO
    needs_ranks = True
    examples = ({"hierarchical": True}, {"slices": 2})

    hierarchical: bool = Field(default=True, description="Exchange in phases inside and across machines.")
    slices: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default="auto",
        description="Parts of an exchange, of which one travels inside while another travels across; auto: by the "
        "rates, if they are known.",
    )

    def parity(self, run: RunFacts) -> Parity:
        if run.precision is not Precision.FP32:
            return Parity(2e-2, _ROUNDING)
        return Parity(1e-3, _ORDER) if run.replicas > 2 else BITWISE

    def refusals(self, run: RunFacts, others: Mapping[str, Strategy]) -> Iterator[Refusal]:
        if not self.hierarchical:
            return
        for name, why in _OTHERS.items():
            if name in others:
                yield Refusal(KEY, True, f"cannot go with strategies.{name}: {why}; leave one of the two out")
        stage = others["zero"].model_dump()["stage"] if "zero" in others else None
        if stage is not None and "offload" not in others and (stage or run.precision is not Precision.FP32):
            what = f"strategies.zero.stage {stage} in {run.precision.value}"
            cure = "add strategies.offload, or leave strategies.zero out"
            yield Refusal(KEY, True, f"cannot go with {what}, whose exchanges DeepSpeed's engine makes itself; {cure}")
        if "offload" in others and others["offload"].model_dump()["reduction"] == "fast":
            cure = "strategies.collectives adds in an order of its own; leave reduction out"
            yield Refusal("strategies.offload.reduction", "fast", cure)

    def refuses_machines(self, firsts: Sequence[int]) -> Iterator[Refusal]:
        counts = {first: firsts.count(first) for first in firsts}
        if not self.hierarchical:
            return
        if len(set(counts.values())) > 1:
            what = " and ".join(str(count) for count in counts.values())
            yield Refusal(KEY, True, f"machines have {what} ranks; start as many on each, or leave it out")
        elif list(firsts) != sorted(firsts):
            yield Refusal(KEY, True, "ranks of a machine are not neighbours; number them machine by machine")

    def narrowed(self, facts: Facts, rank: int) -> Facts:
        """The facts with the number of slices, by which all others see what an exchange takes."""
        ranks, here = facts.run.copies, facts.machine.ranks or facts.run.copies
        if not self.hierarchical or here >= ranks or here == 1:
            return facts
        if ranks % here:
            raise Refusal(KEY, True, f"{ranks} ranks are on machines of {here}: start as many on each, or leave it out")
        slices, machines = self.slices, machines_of(facts)
        if slices == "auto":
            slices = UNKNOWN if machines is None else machines.best(_message_bytes(facts))
        return replace(facts, run=replace(facts.run, two_level=slices))

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if not self.hierarchical:
            raise Idle("hierarchical is false: ranks exchange in one ring")
        if not facts.run.two_level:
            on = (
                "one rank is on each machine" if facts.machine.ranks == 1 < facts.run.copies else "there is one machine"
            )
            raise Idle(f"{on}, so there is nothing to do inside and across")
        yield Reserve(
            unit=RUN,
            reason=self._words(facts),
            owner="collectives: received gradients",
            num_bytes=_received_bytes(facts),
            in_passes=True,
        )

    def _words(self, facts: Facts) -> str:
        run, machines, size = facts.run, machines_of(facts), _message_bytes(facts)
        here, many = facts.machine.ranks, run.two_level
        said = f"exchanges inside machines of {here} ranks, then across {run.copies // here}, in {_slices(many)}"
        if machines is None:
            return f"{said}; the rate between machines is unknown"
        times = ", ".join(
            f"{_slices(each)} {machines.phases(size, each) * 1e3:.3g} ms" for each in sorted({*SLICES, many})
        )
        return (
            f"{said}: all-reduce of {human(size)} in one ring {machines.flat(size) * 1e3:.3g} ms, {times} (simulated)"
        )


def _slices(many: int) -> str:
    return f"{many} slice{'s' * (many > 1)}"


def _message_bytes(facts: Facts) -> int:
    """Of gradients that are exchanged together: what is sent at a time, if the model has as many."""
    return min(MESSAGE_BYTES, facts.num_trainable * facts.run.trained_bytes)


def _received_bytes(facts: Facts) -> int:
    """At most, without ``zero``: a bucket of gradients, which ends with a parameter or is a unit of the model."""
    run, largest = facts.run, max(unit.num_trainable for unit in facts.units)
    bucket = max(MESSAGE_BYTES + run.largest_param * run.trained_bytes, largest * run.trained_bytes)
    return min(bucket, facts.num_trainable * run.trained_bytes)
