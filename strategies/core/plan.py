"""The plan: an immutable answer to every question about every unit, and the bytes that follow from it.

A baseline answers everything first, so every plan is complete; strategies replace answers.

Memory arithmetic. Of a unit and a kind of tensor one rank has ``elements * element_bytes / shards`` bytes (rounded up).
The device's peak follows forward and backward (``peak.py``); parameters, masters, moments and reserved buffers are
alive throughout, and with accumulation the gradients of all units. An evaluation has no gradients, but may have more
rows. Saved tensors that wait on the host have memory there all the time.

If the plan has addresses, each tier is one arena, allocated at the start and never grown. On the device the peak is its
size plus what forward, backward and evaluations have besides; saved tensors that wait on the host are part of the
host's arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, TypeAlias, TypeVar

from deepstow.strategies.core.facts import NO_WORK, Facts, Precision, Unit, Work
from deepstow.strategies.core.facts import Tier as Tier  # part of the vocabulary of plans
from deepstow.strategies.core.layout import Addresses, Layout
from deepstow.strategies.core.peak import Saved, host_room, layerwise_saved, passes_peak

BASELINE = "baseline"
NONE = "none"  # the policy that keeps all
CHUNKS = "chunks"  # the head keeps its logits, and backward computes their softmax again by chunks of rows
INPUT = "input"  # a block's hidden states, among the names of what may wait on the host
RUN = "run"  # the pseudo-unit of decisions about the run as a whole
Slot: TypeAlias = tuple[str, ...]


class Kind(Enum):
    """A kind of tensor that a parameter needs in training."""

    PARAM = "parameters"
    GRAD = "gradients"
    MASTER = "master weights"
    MOMENT = "moments"


class When(Enum):
    """When a reserved buffer is alive: all the time, or only during the optimizer step."""

    ALWAYS = "always"
    STEP = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An answer to one question about one unit. ``reason`` is shown in the table."""

    about: ClassVar[tuple[str, ...]] = ("unit",)  # the fields that say which question it answers
    unit: str
    reason: str

    @property
    def slot(self) -> Slot:
        """The question this answers: two decisions with one slot compete."""
        values = (getattr(self, name) for name in self.about)
        return (type(self).__name__, *(value.name if isinstance(value, Enum) else value for value in values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl(Decision):
    """HOW: the implementation that computes the unit."""

    implementation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Decision):
    """WHO, WHERE: one kind of the unit's tensors is split over ``shards`` ranks, and rests at ``tier`` between uses."""

    about = ("unit", "kind")
    kind: Kind
    shards: int
    element_bytes: int = 0  # 0: the tensor does not exist (no separate master in plain fp32), or a layout places it
    frozen_bytes: int | None = None  # of frozen parameters, where they have another size
    tier: Tier = Tier.DEVICE
    placed: tuple[int, int] | None = None  # by a layout: bytes on the device and on the host, most of them at ``tier``
    stray_reason: str = ""  # why the others are elsewhere: small vectors stay where the matrices of a block leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Decision):
    """KEEP: bytes of saved tensors that forward keeps on the device for backward of one micro-batch."""

    policy: str  # "none": all that autograd saves; "chunks": the head without softmax; else backward runs forward again
    saved_bytes: int
    kept: tuple[str, ...] = ()  # operators whose outputs are kept besides the unit's input, as ``Operator`` names them
    hosted: tuple[str, ...] = ()  # those of these, and of the input (``INPUT``), that wait on the host
    hosted_bytes: int = 0
    again: Work = NO_WORK  # that backward repeats
    open: bool = False  # a later phase may decide again
    may_host: bool = False  # and then also with saved tensors on the host

    @property
    def recomputes(self) -> bool:
        return self.policy not in (NONE, CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Decision):
    """BUFFER: bytes set aside under a name, outside any unit's own tensors."""

    about = ("owner",)
    owner: str
    num_bytes: int
    tier: Tier = Tier.DEVICE
    when: When = When.ALWAYS
    in_passes: bool = False  # used by forward and backward, as saved tensors are: in no arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Stow(Decision):
    """WHERE: the buckets of parameters, where each of them rests, and when it travels. About the run as a whole."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Decision):
    """BUFFER: one address for everything in the layout. ``debug``: the runtime checks every use of a slot."""

    addresses: Addresses
    debug: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSet(Decision):
    """A key of DeepSpeed's config (dotted), which has one writer."""

    about = ("key",)
    key: str
    value: bool | int | float | str


D = TypeVar("D", bound=Decision)


class Conflict(ValueError):
    """Two strategies answered one question differently."""

    def __init__(self, slot: Slot, first: str, second: str) -> None:
        self.second = second
        super().__init__(
            f"strategies.{first} and strategies.{second} both decide {slot[0].lower()} of {' '.join(slot[1:])}, "
            f"differently: remove one of the two"
        )


def _shares(facts: Facts, unit: Unit) -> Iterable[Decision]:
    """Tensors as they are loaded, whole on every rank. Autocast keeps parameters' size; there is no separate master."""
    run = facts.run
    mixed = run.precision is not Precision.FP32
    note = f"autocast computes in {run.precision.value}" if mixed else "plain fp32"
    if 2 in (run.trained_bytes, run.frozen_bytes):
        note = "of model.dtype" if run.trained_bytes == run.frozen_bytes else "frozen ones of model.dtype"
    size = run.trained_bytes
    sizes = {Kind.PARAM: size, Kind.GRAD: size, Kind.MASTER: 0, Kind.MOMENT: size * run.moments}
    for kind, element_bytes in sizes.items():
        frozen = run.frozen_bytes if kind is Kind.PARAM else None
        yield Share(unit=unit.name, reason=note, kind=kind, shards=1, element_bytes=element_bytes, frozen_bytes=frozen)


@dataclass(frozen=True, slots=True)
class Plan:
    """All answers, each with who gave it. Immutable; ``amend`` returns another plan."""

    facts: Facts
    answers: Mapping[Slot, tuple[Decision, str]]
    idle: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def baseline(cls, facts: Facts) -> Plan:
        decisions: list[Decision] = []
        for unit in facts.units:
            decisions.append(Impl(unit=unit.name, reason="as the model defines it", implementation="native"))
            decisions.extend(_shares(facts, unit))
            decisions.append(Keep(unit=unit.name, reason="all kept", policy=NONE, saved_bytes=unit.saved_bytes))
        if scales := facts.run.scales_bytes:
            reason = "of quantised weights, beside them in every layer"
            decisions.append(Reserve(unit=RUN, reason=reason, owner="scales", num_bytes=scales, in_passes=True))
        for held in facts.run.held:
            reserve = Reserve(
                unit=RUN,
                reason=held.reason,
                owner=held.owner,
                num_bytes=held.num_bytes,
                tier=held.tier,
                when=When.STEP if held.in_step else When.ALWAYS,
                in_passes=not held.in_step,
            )
            decisions.append(reserve)
        return cls(facts, MappingProxyType({d.slot: (d, BASELINE) for d in decisions}))

    def amend(self, decisions: Iterable[Decision], by: str) -> Plan:
        """This plan with ``decisions`` in place. Raise Conflict where another strategy has decided differently."""
        answers = dict(self.answers)
        decided: set[Slot] = set()
        for decision in decisions:
            assert decision.slot not in decided, f"{by} decides {' '.join(decision.slot)} twice"
            decided.add(decision.slot)
            former, who = answers.get(decision.slot, (None, BASELINE))
            is_final = who not in (BASELINE, by) and not getattr(former, "open", False)
            if former is not None and is_final and answer(former) != answer(decision):
                raise Conflict(decision.slot, who, by)
            answers[decision.slot] = (decision, by)
        return replace(self, answers=MappingProxyType(answers))

    def _answer(self, kind: type[D], *slot: str) -> D:
        """An answer that every plan has: the baseline gives it."""
        decision = self.answers[kind.__name__, *slot][0]
        assert isinstance(decision, kind)
        return decision

    def share(self, unit: str, kind: Kind) -> Share:
        return self._answer(Share, unit, kind.name)

    def divides(self, kind: Kind) -> bool:
        """Whether ranks divide tensors of this kind."""
        return any(self.share(unit.name, kind).shards > 1 for unit in self.facts.units)

    def num_bytes(self, unit: str, kind: Kind, tier: Tier | None = None) -> int:
        """Bytes of one kind of one unit's tensors on one rank, at one tier or anywhere."""
        share, facts = self.share(unit, kind), self.facts.unit(unit)
        if share.placed is not None:
            return sum(share.placed) if tier is None else share.placed[tier is Tier.HOST]
        elements = facts.num_elements if kind is Kind.PARAM else facts.num_trainable
        total = -(-elements // share.shards) * share.element_bytes
        if share.frozen_bytes is not None:  # quantised ones are never divided, and an element of theirs is a byte
            frozen = -(-(elements - facts.num_trainable) // share.shards) - facts.quantised_bytes
            total += frozen * (share.frozen_bytes - share.element_bytes)
            total += facts.quantised_bytes * (1 - share.element_bytes)
        return total if tier in (None, share.tier) else 0

    def total(self, kind: Kind, tier: Tier | None = None) -> int:
        return sum(self.num_bytes(unit.name, kind, tier) for unit in self.facts.units)

    @property
    def layout(self) -> Layout | None:
        """None if no strategy stows parameters."""
        return self._answer(Stow, RUN).layout if (Stow.__name__, RUN) in self.answers else None

    @property
    def loads_spans(self) -> bool:
        """Whether ranks share all weights under the memory engine, so that each of them can load its spans."""
        layout, facts = self.layout, self.facts
        shared = layout is not None and any(bucket.shards > 1 for bucket in layout.buckets)
        return shared and facts.run.stages == facts.run.tensor == 1 and facts.num_trainable == facts.num_params

    @property
    def place(self) -> Place | None:
        return self._answer(Place, RUN) if (Place.__name__, RUN) in self.answers else None

    @property
    def addresses(self) -> Addresses | None:
        return self.place.addresses if self.place else None

    def keep(self, unit: str) -> Keep:
        return self._answer(Keep, unit)

    def saved_bytes(self, unit: str) -> int:
        return self.keep(unit).saved_bytes

    def saved_peak(self) -> int:
        """The most bytes that forward and backward have on the device besides the states."""
        kept = self.kept()
        return self._received() + self.passes_peak(kept, [0] * len(kept))

    def passes_peak(self, kept: Sequence[Saved], landing: Sequence[int]) -> int:
        """The peak of forward and backward with what units save, and the gradients that each leaves where none were."""
        run = self.facts.run
        if run.layerwise > 1:
            streams = [unit.choices.stream_bytes for unit in self.facts.units if unit.choices is not None]
            width = 4 if run.autocast else run.precision.element_bytes
            crossing = max(streams, default=run.micro_batch * run.sequence * run.hidden_size * width)
            trained = [unit.num_trainable * run.precision.element_bytes for unit in self.facts.units]
            kept = layerwise_saved(kept, run.layerwise, crossing, trained, keeps_heads=run.loss_reads_blocks)
        return passes_peak(kept, landing, run.in_flight)

    def transient_peak(self) -> int:
        """The most bytes that training or an evaluation has on the device besides the arena."""
        return max(self.saved_peak(), self._received() + self.facts.run.evaluation_bytes)

    def _received(self) -> int:
        """Bytes of the device that are reserved outside of the arena."""
        return sum(reserve.num_bytes for reserve in self.reserves(Tier.DEVICE) if reserve.in_passes)

    def units(self) -> list[Unit]:
        """The units of the facts, the head with what its loss keeps in this plan."""
        return [unit.with_chunks() if self.keep(unit.name).policy == CHUNKS else unit for unit in self.facts.units]

    def hosted_bytes(self) -> int:
        """Reserved on the host for saved tensors that wait there."""
        keeps = (self.keep(unit.name) for unit in self.facts.units)
        return self.facts.run.layerwise * sum(host_room(keep.hosted_bytes, len(keep.hosted)) for keep in keeps)

    def facts_as_kept(self) -> Facts:
        """The facts with what backward repeats and brings back from the host, as the cost of a step needs them."""
        keeps = [self.keep(unit.name) for unit in self.facts.units]
        pairs = zip(self.facts.units, keeps, strict=True)
        units = (replace(unit, again=keep.again, hosted_bytes=keep.hosted_bytes) for unit, keep in pairs)
        return replace(self.facts, units=tuple(units))

    def kept(self) -> list[Saved]:
        """Per unit the bytes from its forward on, those during its backward, and those on the host."""
        saved = []
        for unit, keep in ((unit, self.keep(unit.name)) for unit in self.units()):
            working = unit.choices.running_bytes if unit.choices and keep.recomputes else keep.saved_bytes
            saved.append(Saved(keep.saved_bytes, working, keep.hosted_bytes, unit.temporaries))
        return saved

    def reserves(self, tier: Tier) -> tuple[Reserve, ...]:
        reserves = (d for d, _ in self.answers.values() if isinstance(d, Reserve))
        return tuple(d for d in reserves if d.tier is tier)

    def states(self, tier: Tier) -> int:
        """Bytes of parameters, gradients, masters and moments that rest at ``tier``."""
        return sum(self.total(kind, tier) for kind in Kind)

    def _standing(self, tier: Tier) -> int:
        """Bytes that are at ``tier`` all along where nothing is placed: states but gradients, and what is reserved."""
        always = sum(reserve.num_bytes for reserve in self.reserves(tier) if reserve.when is When.ALWAYS)
        return sum(self.total(kind, tier) for kind in Kind if kind is not Kind.GRAD) + always

    def beside(self) -> int:
        """Bytes of the device that are taken between two steps: by the arena, or by states without gradients."""
        if self.addresses is None:
            return self._standing(Tier.DEVICE)
        return self.addresses.num_bytes(Tier.DEVICE) + self._received()

    def peak(self, tier: Tier) -> int:
        """Predicted peak on one rank, in bytes. See the module docstring for what is alive when."""
        if self.addresses is not None:
            chosen = sum(reserve.num_bytes for reserve in self.reserves(Tier.HOST) if reserve.in_passes)
            besides = self.transient_peak() if tier is Tier.DEVICE else self.facts.machine.runtime_host_bytes + chosen
            return self.addresses.num_bytes(tier) + besides
        kept = self.kept() if tier is Tier.DEVICE else [Saved(0, 0)] * len(self.facts.units)
        return self.peak_with(tier)(kept)

    def peak_with(self, tier: Tier) -> Callable[[Sequence[Saved]], int]:
        """A function from the bytes that units save to the predicted peak; all else as in this plan, unplaced."""
        standing = self._standing(tier)
        if tier is Tier.HOST:
            standing += self.facts.machine.runtime_host_bytes + self.hosted_bytes()
        at_step = sum(reserve.num_bytes for reserve in self.reserves(tier) if reserve.when is When.STEP)
        grads = [self.num_bytes(unit.name, Kind.GRAD, tier) for unit in self.facts.units]
        evaluation = self.facts.run.evaluation_bytes if tier is Tier.DEVICE else 0
        all_along = sum(grads) if self.facts.run.accumulation > 1 else 0
        landing, stepping = [0] * len(grads) if all_along else grads, sum(grads) + at_step

        def peak(kept: Sequence[Saved]) -> int:
            passes = self.passes_peak(kept, landing)
            return standing + max(stepping, all_along + passes, evaluation)

        return peak

    def engine(self) -> dict[str, bool | int | float | str]:
        """DeepSpeed's keys (dotted) and values; empty when no strategy uses its engine."""
        return {d.key: d.value for d, _ in self.answers.values() if isinstance(d, EngineSet)}

    def decided_by(self, *slots: Slot) -> str:
        """Who gave the answers in ``slots``: strategies in order, or the baseline."""
        names = sorted({self.answers[slot][1] for slot in slots} - {BASELINE})
        return ", ".join(names) or BASELINE


def answer(decision: Decision) -> tuple[object, ...]:
    """The values of a decision without unit and reasons: what two strategies must agree on."""
    names = (item.name for item in fields(decision) if item.name not in ("reason", "stray_reason", "unit"))
    return tuple(getattr(decision, name) for name in names)
