"""One bucket at run time: its parameters, the views of its memory, and who holds what at this moment.

Invariant. A parameter is *shown* (``parameters.py``: present or visiting, its memory a view of the home) only while
COMPUTE may read the home: the newest weights have arrived there, and nobody may take the address away. Those that stay
are shown until their next update begins; those that travel while a scope that uses them is open. Otherwise it is an
``AbsentParameter``, whose own memory is one NaN expanded to its shape as soon as the home is not its own. One that is
on loan is left alone (``loans.py``).

[Note: versions] Torch counts the writes to a tensor, notes the count with every tensor that it saves for backward, and
raises where it has changed when backward reads it. Parameters that are not shown have a count that none has otherwise.
So a node of backward that reads a weight while its home may be another's is refused by torch itself, whatever brought
it there; ``guard.py`` is about having the weight there instead.

Events that the bucket remembers, each the last of its kind:
    arrived   UP wrote the home, or read PARKED or COPY for it
    used      COMPUTE used the home, or wrote it in an update
    stored    DOWN read the home or a visit slot and wrote the host's copy
    sent      DOWN wrote PARKED or ARRIVAL from the gradient slot
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strategies.core.layout import Bucket, Item, Layout, leads
from strategies.core.plan import Home
from strategies.engine.memory.arena import Arena
from strategies.engine.tensors.parameters import (
    WRITE,
    AbsentParameter,
    PresentParameter,
    StowedParameter,
    VisitingParameter,
    put,
    set_counts,
    set_data,
)
from strategies.engine.transfer.transfer import Event

if TYPE_CHECKING:
    from strategies.engine.updates import Job


AWAY = 2**31 - 1  # see [Note: versions]; beyond any number of updates


class Presence(Enum):
    """Who holds a bucket's home."""

    ABSENT = "another bucket, or nobody"
    PRESENT = "this bucket"


class Pending(Enum):
    """What stands between a bucket and its newest weights."""

    NOTHING = "nothing"
    DEVICE = "an update on the device, not begun"
    VISITING = "an update on the device, its state on the way up"
    HOST = "an update by the worker"


@dataclass(slots=True, eq=False)
class BucketState:
    """A bucket of the layout with its tensors. Flat views cover the bucket; ``None`` where the layout has no need."""

    spec: Bucket
    index: int
    params: list[nn.Parameter]
    weight: Tensor
    copy: Tensor | None
    grad: Tensor | None
    parked: Tensor | None
    arrival: Tensor | None
    master: Tensor | None
    moments: list[Tensor]
    steps: Tensor | None
    visit: Tensor | None
    nan: Tensor
    fused: frozenset[int]  # parameters of modules with one kernel for all of it, taken only if all are plain tensors
    shapes: list[torch.Size]
    versions: list[int]  # of the parameters: their updates, and whatever else has written to them
    counts: list[int]  # what torch's count of writes was set to; see [Note: versions]
    leads: tuple[int, int] = (1, 1)  # steps ahead of its use that its weight may come, in forward and in backward

    own: list[int] = field(default_factory=list)  # parameters that are not on loan (``loans.py``)
    presence: Presence = Presence.ABSENT
    bound: bool = False  # the parameters' memory is the home
    shown: bool = False  # see the invariant
    open: int = 0  # scopes that use it now
    pending: Pending = Pending.NOTHING
    job: Job | None = None
    future: Future[tuple[bool, Event]] | None = None
    overlapping: list[BucketState] = field(default_factory=list)  # buckets whose homes overlap this one's
    landed: set[int] = field(default_factory=set)  # parameters whose gradient of this micro-batch is here
    unsent: set[int] = field(default_factory=set)  # of those: not yet on their way to the host
    touched: set[int] = field(default_factory=set)  # parameters with a gradient since the last update
    spent: set[int] = field(default_factory=set)  # parameters whose last gradient was stepped with and is not zeroed
    zeroed: set[int] = field(default_factory=set)  # parameters whose gradient was made zero instead of None
    summed: set[int] = field(default_factory=set)  # of those touched: parameters whose gradient is in PARKED
    added: Future[Event] | None = None  # the worker's last addition to PARKED
    norms: dict[int, Tensor] = field(default_factory=dict)
    norms_later: tuple[list[int], Future[list[Tensor]]] | None = None
    generation: int = 0  # of the home: how often this bucket has moved in
    arrived: Event | None = None
    used: Event | None = None
    stored: Event | None = None
    sent: Event | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def present(self) -> bool:
        return self.presence is Presence.PRESENT

    @property
    def kind(self) -> type[StowedParameter]:
        """What its parameters are while they are shown."""
        return PresentParameter if self.spec.resident else VisitingParameter

    @property
    def settled(self) -> bool:
        """Whether the newest weights are where they rest."""
        return self.pending is Pending.NOTHING

    @property
    def parks_down(self) -> bool:
        return self.spec.grad_home is Home.HOST

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The flat stretch of parameter ``index`` in a flat view of the bucket."""
        start = self.spec.offsets[index]
        return flat[start : start + self.spec.sizes[index]]

    def shaped(self, flat: Tensor, index: int) -> Tensor:
        """The same, in the parameter's shape."""
        return self.part(flat, index).view(self.shapes[index])

    def gradients(self, indices: Iterable[int]) -> list[Tensor]:
        """The gradients of these parameters in the bucket's slot, in their shapes."""
        assert self.grad is not None, f"{self.name} is frozen"
        return [self.shaped(self.grad, index) for index in indices]

    def shows(self, index: int) -> bool:
        """Whether parameter ``index`` is shown: not, if it is on loan."""
        return self.shown and index in self.own

    def show(self) -> None:
        """COMPUTE may read the home, until ``cover`` or ``hide``."""
        if self.shown:
            return
        for index in self.own:
            param = self.params[index]
            param.__class__ = PresentParameter
            if not self.bound:
                set_data(param, self.shaped(self.weight, index))
            param.__class__ = self.kind
        self.bound = self.shown = True
        self._count()

    def show_plainly(self) -> None:
        """Forward without gradients: modules that have a kernel for it take it, as they would elsewhere."""
        for index in self.fused.intersection(self.own) if self.shown else ():
            self.params[index].__class__ = PresentParameter

    def cover(self) -> None:
        """Nobody uses it now: its address may be taken."""
        if not self.shown:
            return
        for index in self.own:
            self.refuse_writes(index)
            self.params[index].__class__ = AbsentParameter
        self.shown = False
        self._count()

    def hide(self) -> None:
        """What its parameters' memory holds is not theirs any more, or about to be replaced."""
        self.bound = self.shown = False
        for index in self.own:
            self.restore(index)

    def restore(self, index: int) -> None:
        """Let one parameter be what the bucket is."""
        param = self.params[index]
        param.__class__ = PresentParameter  # whose attributes are set without a detour
        self.versions[index] += param._version - self.counts[index]  # somebody wrote to it, who was allowed to
        put(param, self.shaped(self.weight, index) if self.bound else self.nan.expand(self.shapes[index]))
        self._count_one(index, self.versions[index] if self.shown else AWAY)
        param.__class__ = self.kind if self.shown else AbsentParameter

    def lend(self, index: int, value: Tensor, kind: type[nn.Parameter]) -> None:
        """Let one parameter be a ``kind`` in memory of its own, which holds ``value``."""
        self.own = [other for other in self.own if other != index]
        param = self.params[index]
        param.__class__ = PresentParameter
        put(param, value)
        self._count_one(index, self.versions[index])  # as if shown: the value is the same, until somebody writes
        param.__class__ = kind

    def take_back(self, index: int) -> None:
        """The parameter is what the bucket is again; its weight is where it rests."""
        self.own = sorted({*self.own, index})
        self.restore(index)

    def release(self, index: int) -> None:
        """Let one parameter be a plain parameter from now on, with a copy of its weight on the CPU."""
        self.lend(index, self.shaped(self.rest(), index).to("cpu", copy=True), nn.Parameter)

    def _count(self) -> None:
        """Set torch's counts of writes; see [Note: versions]."""
        for index in self.own:
            self.counts[index] = self.versions[index] if self.shown else AWAY
        set_counts(tuple(self.params[index] for index in self.own), tuple(self.counts[index] for index in self.own))

    def _count_one(self, index: int, count: int) -> None:
        self.counts[index] = count
        set_counts((self.params[index],), (count,))

    def refuse_writes(self, index: int) -> None:
        """Do nothing where parameter ``index``, which is shown, has only been read.

        Raises:
            RuntimeError: it was written to, which the host's copy or the master does not know.
        """
        self.params[index].__class__ = PresentParameter  # whose attributes are read without a detour
        if self.params[index]._version != self.counts[index]:
            raise RuntimeError(f"{self.spec.params[index]} was written to in place; {WRITE}")

    def refuse_loans(self) -> None:
        """Do nothing where no parameter is on loan.

        Raises:
            RuntimeError: one is, and an update is to begin.
        """
        if len(self.own) < len(self.params):
            raise RuntimeError(
                f"{self.name}: backward inside of `with optimizer.present(...)`, and the plan updates there"
            )

    def updated(self, indices: Iterable[int]) -> None:
        """An update of these begins: a graph that holds their old values may not be used any more."""
        for index in indices:
            if self.shown:
                self.refuse_writes(index)
            self.versions[index] += 1
        self._count()

    def leave(self) -> None:
        """The home belongs to somebody else from now on."""
        self.hide()
        self.presence = Presence.ABSENT

    def rest(self) -> Tensor:
        """Where the weights rest between uses: the host's copy where they travel, else the home."""
        return self.weight if self.copy is None else self.copy

    def states(self) -> list[Tensor]:
        """What an update on the device needs besides the weight, in the order in which it visits."""
        return ([] if self.master is None else [self.master]) + self.moments


class BucketOf(dict[int, tuple[BucketState, int]]):
    """The bucket of each parameter, by its id, and its number there."""

    def __missing__(self, param: int) -> tuple[BucketState, int]:
        raise RuntimeError(
            "a parameter of this model is not the one that was stowed: model.to(), to_empty() or an assignment has "
            "put another in its place; close() the optimizer before such changes"
        )


def hold(
    spec: Bucket,
    index: int,
    params: list[nn.Parameter],
    arena: Arena,
    nan: Tensor,
    layout: Layout,
    fused: Collection[int] = (),
) -> BucketState:
    """The bucket with its views of ``arena``. ``fused``: ids of parameters, see the field."""
    dtype = getattr(torch, spec.dtype)
    count, num_moments = spec.num_elements, layout.moments

    def flat(item: Item, of: torch.dtype, numbers: int = 1) -> Tensor | None:
        region = arena.of(spec.name, item, of)
        return None if region is None else region[: numbers * count]

    weight = flat(Item.WEIGHT, dtype)
    assert weight is not None, f"{spec.name} has no home"
    moments = flat(Item.MOMENTS, torch.float32, num_moments)
    steps = arena.of(spec.name, Item.STEPS, torch.float32)
    visitors = num_moments + spec.mixed
    return BucketState(
        spec=spec,
        index=index,
        params=params,
        weight=weight,
        copy=flat(Item.COPY, dtype),
        grad=flat(Item.GRAD, dtype),
        parked=flat(Item.PARKED, dtype),
        arrival=flat(Item.ARRIVAL, dtype),
        master=flat(Item.MASTER, torch.float32),
        moments=[] if moments is None else list(moments.view(num_moments, count)),
        steps=None if steps is None else steps[: len(params)],
        visit=flat(Item.VISIT, torch.float32, visitors),
        nan=nan,
        fused=frozenset(index for index, param in enumerate(params) if id(param) in fused),
        shapes=[param.shape for param in params],
        versions=[param._version for param in params],
        counts=[param._version for param in params],
        leads=leads(spec, layout),
        own=list(range(len(params))),
    )


def find_overlapping(buckets: list[BucketState], arena: Arena) -> None:
    """Fill in which homes overlap. Residents overlap none."""
    spots = {bucket.name: arena.addresses.of(bucket.name, Item.WEIGHT) for bucket in buckets}
    for bucket in buckets:
        bucket.overlapping = [
            other for other in buckets if other is not bucket and spots[bucket.name].overlaps(spots[other.name])
        ]
