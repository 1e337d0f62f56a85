"""Collectives: ranks of several machines exchange inside their machines first, then across, in slices that overlap.

For W bytes on M machines with g ranks each, a rank sends 2 (M-1)/M W/g to other machines for an all-reduce. A ring of
all N ranks sends 2 (N-1)/N W/g, and the straight exchange of the memory engine (N-g)/N W, which is g times as much.

Invariant. Ranks of a machine are added in their order, then machines in theirs, ((r0 + r1) + (r2 + r3)), whatever the
number of slices; all ranks end with the same bits. Rings add more than two ranks in an order of their own.

How they exchange is said in ``strategies/engine/ranks/two_level.py``, what it takes in
``strategies/planner/network.py``. Who exchanges: torch's DistributedDataParallel by a communication hook, DeepSpeed's
stage 0 between its backward and its step (``strategies/plugins/two_level.py``), and the memory engine. Refused: what
exchanges otherwise, such as DeepSpeed's other stages, and machines with different numbers of ranks.

``compress`` makes messages of data parallelism smaller instead (``strategies/plugins/compressed.py``), plain or in the
memory engine. It is lossy, and no tolerance is declared: what is not sent now is sent later, or never. Refused beside
all that exchanges gradients otherwise (``zero`` without ``offload`` among it), in phases as well, and where errors that
are kept would be of another scale (fp16's loss scale).
``local_steps`` (``strategies/plugins/local_steps.py``) is lossy in the same sense, and refused beside the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from deepstow.strategies.core.compatibility import Rule
from deepstow.strategies.core.facts import Compression, Facts, Precision, RunFacts
from deepstow.strategies.core.optimizers import BITSANDBYTES, ELEMENTWISE
from deepstow.strategies.core.plan import RUN, Decision, Plan, Reserve
from deepstow.strategies.core.protocol import BITWISE, LOSSY, Idle, Parity, Phase, Refusal, Removed, Strategy
from deepstow.strategies.core.resume import on_resume
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.engine_bytes import MESSAGE_BYTES
from deepstow.strategies.planner.lossy import bucket_bytes, reserves
from deepstow.strategies.planner.network import SLICES, UNKNOWN, best, machines_of, phases

ALONE = tuple(name for name in ELEMENTWISE if name not in BITSANDBYTES)  # whose state ranks save, each its own
KEY, COMPRESS = "strategies.collectives.hierarchical", "strategies.collectives.compress"
LOCAL = "strategies.collectives.local_steps"
_OPTIONS: Mapping[str, tuple[str, ...]] = {  # the methods that each is of
    "density": ("topk",),
    "momentum": ("topk",),
    "rank": ("powersgd",),
    "start": ("powersgd", "topk", "int8"),
}
_ORDER = (
    "gradients of more than two ranks are added in another order than by plain data parallelism; where those of an "
    "element cancel, Adam moves it by the learning rate in either direction"
)
_ROUNDING = "beside strategies.offload or zero weights are rounded to 16 bits where plain training autocasts fp32"
_RING = "messages go in one ring; leave hierarchical and slices out"
_BITS = "gradients have 16 bits already, by model.dtype; leave it out, or train in float32 or bf16: true"
_SCALE = "what ranks keep has the loss scale of training.fp16, which changes; take bf16: true"
_OWES = "would keep what ranks owe on the device; take compress: none, bf16 or fp16"
_IN_ENGINE = "gradients have 16 bits already in strategies.offload; take powersgd, topk or int8"
_MOMENTUM = "is in place of the optimizer's; write training.optim: sgd without optim_args, or leave it out"
_NO_MOMENTUM = "local_steps exchanges differences, which have none; leave it out"
_BUCKETS = "training.gradient_checkpointing makes torch form buckets anew; take strategies.recompute instead"
_OTHERS: Mapping[str, str] = {
    "tensor": "DeepSpeed's engine exchanges inside layers itself",
    "pipeline": "its stages add up gradients in groups of their own",
    "sequence": "it has not been compared with rows whose parts are on several ranks",
    "experts": "their gradients are added up in groups of their own",
}
_OTHERWISE, _ENGINE = "which exchanges otherwise", "strategies.offload"
RULES = (
    *(Rule(KEY, f"strategies.{name}", why) for name, why in _OTHERS.items()),
    *(
        Rule(
            KEY,
            f"strategies.zero.stage = {stages}",
            "DeepSpeed's engine makes its exchanges itself",
            "add strategies.offload, or leave strategies.zero out",
            unless=_ENGINE,
        )
        for stages in ("1|2|3", "0 and training.bf16", "0 and training.fp16")
    ),
    Rule("strategies.offload.reduction = fast", KEY, "it adds in an order of its own", "leave reduction out"),
    *(
        Rule(key, f"strategies.{name}", _OTHERWISE, unless=LOCAL if key == COMPRESS else "")
        for key in (COMPRESS, LOCAL)
        for name in _OTHERS
    ),
    Rule(
        COMPRESS,
        "strategies.zero",
        _OTHERWISE,
        "leave one of the two out, or add strategies.offload",
        f"{_ENGINE} or {LOCAL}",
    ),
    Rule(LOCAL, "strategies.zero", _OTHERWISE),
    *(
        Rule(f"strategies.offload.{option}", LOCAL, "it has not been compared")
        for option in ("disk", "moments != fp32", "masters != fp32")
    ),
)
EXCHANGED = on_resume("compression")


class Collectives(Strategy):
    """Exchange gradients, and the memory engine's spans, inside each machine first and then across machines.

    For several machines with several ranks each, whose network is slower than what is inside them. Machines are those
    of the launcher, and need as many ranks each. With compress plain data parallelism sends less over slow links, and
    the result is another one; with local_steps they send nothing but now and then.
    """

    phase = Phase.WHO
    resume = "said"
    examples = ({"hierarchical": True}, {"slices": 2})
    removed = {
        ("compress", "onebit"): Removed(
            "1-bit Adam learned less than what sends as much; write powersgd or int8",
            "1-bit Adam's momentum and frozen variance are not AdamW's; start anew from its weights",
        )
    }

    hierarchical: bool = Field(default=True, description="Exchange in phases inside and across machines.")
    slices: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default="auto",
        description="Parts of an exchange, of which one travels inside while another travels across; auto: by the "
        "rates, if they are known.",
    )
    compress: Literal["none", "bf16", "fp16", "powersgd", "topk", "int8"] = Field(
        default="none",
        description="Lossy: send gradients in fewer bytes, plainly or beside offload, in one ring.",
        json_schema_extra=EXCHANGED,
    )
    density: float = Field(
        default=0.01, gt=0, le=1, description="Part of the elements that topk sends.", json_schema_extra=EXCHANGED
    )
    momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="With topk and optim sgd: momentum of each rank's own gradients.",
        json_schema_extra=EXCHANGED,
    )
    rank: int = Field(
        default=4,
        ge=1,
        le=128,
        description="Rank of the two factors that powersgd sends of a matrix.",
        json_schema_extra=EXCHANGED,
    )
    start: int = Field(
        default=10,
        ge=2,
        description="Steps before topk, int8 or powersgd begins; they send all.",
        json_schema_extra=EXCHANGED,
    )

    local_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Lossy: ranks train alone for so many steps, then exchange differences (DiLoCo).",
        json_schema_extra=EXCHANGED,
    )
    outer_lr: float = Field(
        default=0.7,
        gt=0,
        description="Learning rate of the SGD that takes these differences.",
        json_schema_extra=EXCHANGED,
    )
    outer_momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Its Nesterov momentum.", json_schema_extra=EXCHANGED
    )

    @model_serializer(mode="wrap")
    def _without_what_does_not_apply(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Defaults of other methods are left out: written down in a run's ``config.yaml`` they would be refused."""
        alone, lossy = self.local_steps is not None, self._lossy
        idle = {option for option, methods in _OPTIONS.items() if self.compress not in methods}
        idle |= {"start"} if alone else {"outer_lr", "outer_momentum"}
        idle |= {"hierarchical", "slices"} if lossy else set()
        return {key: value for key, value in plain(self).items() if key not in idle - self.model_fields_set}

    @property
    def _lossy(self) -> bool:
        return self.compress != "none" or self.local_steps is not None

    @property
    def _what(self) -> tuple[str, object]:
        return (COMPRESS, self.compress) if self.local_steps is None else (LOCAL, self.local_steps)

    @property
    def _in_phases(self) -> bool:
        return self.hierarchical and not self._lossy

    def parity(self, run: RunFacts) -> Parity:
        if self._lossy:
            exchanged = "gradients" if self.local_steps is None else "differences of ranks that train alone"
            return Parity(LOSSY, f"{exchanged} are exchanged as {self._compression().words}, which loses part of them")
        if run.precision is not Precision.FP32:
            return Parity(2e-2, _ROUNDING)
        return Parity(1e-3, _ORDER) if run.replicas > 2 else BITWISE

    def refusals(self, run: RunFacts) -> Iterator[Refusal]:
        for option, methods in _OPTIONS.items():
            if option in self.written and self.compress not in methods:
                value, words = self.written[option], f"is of {', '.join(methods)}, not of {self.compress}; leave it out"
                yield Refusal(f"strategies.collectives.{option}", value, words)
        for option in sorted({"outer_lr", "outer_momentum"} & self.written.keys()) if self.local_steps is None else ():
            yield Refusal(f"strategies.collectives.{option}", self.written[option], "is of local_steps; leave it out")
        if self._lossy:
            yield from self._refuses_lossy(run)
        if self.local_steps is not None and 0 < run.steps < self.local_steps:
            cure = f"ranks would exchange nothing in training.max_steps = {run.steps}; lower it"
            yield Refusal(LOCAL, self.local_steps, cure)

    def _refusal(self, cure: str) -> Refusal:
        """Of exchanging in phases, which the file need not say."""
        if "hierarchical" in self.written:
            return Refusal(KEY, True, cure)
        return Refusal("strategies.collectives", self.written, cure)

    def _refuses_lossy(self, run: RunFacts) -> Iterator[Refusal]:
        alone = self.local_steps is not None
        owes = self._compression().owes
        in_fp16 = run.precision is Precision.FP16
        powersgd, begins = self.compress == "powersgd", "start" in self.written
        engine = run.stowed
        sixteen = run.precision is Precision.BF16 and not run.adapters
        if self.momentum and (alone or run.optim != "sgd" or run.moments):
            cure = _NO_MOMENTUM if alone else _MOMENTUM
            yield Refusal("strategies.collectives.momentum", self.momentum, cure)
        for holds, cure in (
            (engine and alone and owes, _OWES),
            (engine and sixteen and not owes and not alone, _IN_ENGINE),
            (self.written.get("hierarchical") is True or "slices" in self.written, _RING),
            (run.trained_bytes != 4 and not engine, _BITS),
            (in_fp16 and (alone or owes), _SCALE),
            (alone and powersgd, "exchanges differences; take compress: none, bf16, fp16, topk or int8"),
            (alone and begins and owes, "compresses from its first exchange on; leave start out"),
            (alone and run.optim not in ALONE, f"ranks cannot save {run.optim}, each its own; take {', '.join(ALONE)}"),
            (powersgd and not alone and not engine and run.recomputes, _BUCKETS),
        ):
            if holds:
                yield Refusal(*self._what, cure)

    def _compression(self) -> Compression:
        plain = (self.compress, self.density, self.rank, self.start)
        return Compression(*plain, self.local_steps or 0, self.outer_lr, self.outer_momentum, self.momentum)

    def refuses_machines(self, firsts: Sequence[int]) -> Iterator[Refusal]:
        counts = {first: firsts.count(first) for first in firsts}
        if not self._in_phases:
            return
        if len(set(counts.values())) > 1:
            sizes = " and ".join(str(count) for count in counts.values())
            yield self._refusal(f"machines have {sizes} ranks; start as many on each, or leave it out")
        elif list(firsts) != sorted(firsts):
            yield self._refusal("ranks of a machine are not neighbours; number them machine by machine")

    def narrowed(self, facts: Facts, rank: int) -> Facts:
        """The facts with the number of slices, by which all others see what an exchange takes."""
        ranks, local = facts.run.copies, facts.machine.ranks or facts.run.copies
        if self._lossy and ranks > 1:
            return replace(facts, run=replace(facts.run, compression=self._compression()))
        if not self._in_phases or local >= ranks or local == 1:
            return facts
        if ranks % local:
            raise self._refusal(f"{ranks} ranks are on machines of {local}: start as many on each, or leave it out")
        slices, machines = self.slices, machines_of(facts)
        if slices == "auto":
            slices = UNKNOWN if machines is None else best(machines, _message_bytes(facts))
        return replace(facts, run=replace(facts.run, two_level=slices))

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if facts.run.compression is not None:
            yield from reserves(facts)
            return
        if self._lossy:
            raise Idle("there is one rank, so nothing is exchanged")
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
            num_bytes=bucket_bytes(facts),
            in_passes=True,
        )

    def _words(self, facts: Facts) -> str:
        run = facts.run
        machines = machines_of(facts)
        size = _message_bytes(facts)
        local, many = facts.machine.ranks, run.two_level
        summary = f"exchanges inside machines of {local} ranks, then across {run.copies // local}, in {_slices(many)}"
        if machines is None:
            return f"{summary}; the rate between machines is unknown"
        times = ", ".join(
            f"{_slices(count)} {phases(machines, size, count) * 1e3:.3g} ms" for count in sorted({*SLICES, many})
        )
        once = machines.all_reduce_seconds(size, machines.ranks)
        return f"{summary}: all-reduce of {human(size)} of all ranks at once {once * 1e3:.3g} ms, {times} (simulated)"


def _slices(many: int) -> str:
    return f"{many} slice{'s' * (many > 1)}"


def _message_bytes(facts: Facts) -> int:
    """Of gradients that are exchanged together: what is sent at a time, if the model has as many."""
    return min(MESSAGE_BYTES, facts.num_trainable * facts.run.trained_bytes)
