"""One bucket at run time: its parameters, the views of its memory, and the state of its weights.

Only this file writes the state of a bucket (``tests/unit/test_architecture.py``); others call its methods, which are
the transitions, and read. Events are written by whoever records them. ``grads`` is the state of its gradients
(``gradient_state.py``), ``views`` what its parameters are to the model (``parameter_views.py``).

    pending     NOTHING -> DEVICE -> VISITING -> NOTHING  an update on the device: ``submit``, ``begin_visit``,
                                                          ``settled_on_device``
                NOTHING -> HOST -> NOTHING                an update by the worker: ``submit``, ``settled_on_host``
    present     its home holds its weights, or UP is writing them: from ``claim`` until ``vacate``
    given_up    the host's copy is overwritten by the gradient, whose place it is (``parks_in_copy``): from
                ``give_up_copy`` until the next update or ``restored``. Its weights are the rounded masters then.
    open        how many scopes that use it have been entered and not left

    replaced    how many updates and loads have begun to replace its weights: on all ranks alike

Over ranks (``shards`` of the layout) the home and the gradient slot are whole; all other memory is this rank's span:
``own`` is the span of a whole view, ``pieces`` are the parameters' parts in it, ``sources`` what all ranks read of all.

Events of a bucket, each the last of its kind:
    arrived   UP wrote the home, or read PARKED or COPY for it; and NET brought the other ranks' spans of the home
    used      COMPUTE used the home, or wrote it in an update
    stored    DOWN read the home or a visit slot and wrote the host's copy
    sent      (of ``grads``) DOWN wrote PARKED or ARRIVAL from the gradient slot
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.core.formats import FORMATS, HOST_CHUNK
from deepstow.strategies.core.layout import Bucket, Item, Layout, Site, leads, parks_in_copy
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.engine.buckets.gradient_state import GradientState
from deepstow.strategies.engine.codecs import STATE, EncodedWeights, once_encoded
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.pieces import Piece, Stretch, in_memory, pieces_of
from deepstow.strategies.engine.tensors.loans import HandedOut
from deepstow.strategies.engine.tensors.nested import same_bits
from deepstow.strategies.engine.tensors.parameter_views import ParameterViews
from deepstow.strategies.engine.tensors.parameters import put
from deepstow.strategies.engine.transfer.transfer import Event


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor on every gradient of a step, and whether the step is to be skipped."""

    factor: Tensor | None  # one fp32 number on the device; None: there is nothing to multiply
    bad: Tensor  # the same; 1.0: a gradient is not finite
    on_host: Tensor  # both for the worker, once ``known`` has passed
    known: Event

    @property
    def skips(self) -> bool:
        """Whether the step is to be skipped. Only valid after ``known`` has passed; reads host memory."""
        return bool(self.on_host.numpy()[1])


@dataclass(frozen=True, slots=True)
class Job:
    """An update of the parameters of a bucket that have a gradient, which is multiplied by the scale first."""

    touched: tuple[int, ...]
    group: Mapping[str, Any]  # a copy of their parameter group
    scale: Scale


class Pending(Enum):
    """The update that has to be finished before the newest weights can be read."""

    NOTHING = "none"
    DEVICE = "on the device, not begun"
    VISITING = "on the device, its state on the way up"
    HOST = "by the worker"


class BucketState:
    """Bucket ``spec``, number ``index`` of ``layout``. ``memory`` has flat views of ``arena``, of all that the layout
    needs: WEIGHT and GRAD are of the whole bucket, the others of this rank's span, which is all unless ranks share it.
    ``nan`` is a single one on the device; ``fused`` has ids of parameters of modules with a fused kernel. ``on_disk``:
    stretches of state that has no other memory; ``resting``: bytes of a weight that is there.
    """

    def __init__(
        self,
        spec: Bucket,
        index: int,
        params: list[nn.Parameter],
        arena: Arena,
        nan: Tensor,
        layout: Layout,
        fused: Collection[int],
        rank: int,
        on_disk: Sequence[Stretch] = (),
        resting: Tensor | None = None,
    ) -> None:
        dtype = getattr(torch, spec.dtype)
        kinds = {
            Item.WEIGHT: (dtype, spec.num_elements),
            Item.GRAD: (dtype, spec.num_elements),
            Item.ARRIVAL: (dtype, spec.share),
            Item.PARKED: (dtype, spec.share),
            Item.MASTER: (torch.float32 if spec.mixed else dtype, spec.share),
            Item.VISIT: (torch.float32, (layout.moments + spec.mixed) * spec.share),
            Item.STEPS: (torch.float32, len(params)),
        }
        if not spec.frozen_as:
            kinds[Item.COPY] = (dtype, spec.share)
        regions = ((item, arena.of(spec.name, item, kind), size) for item, (kind, size) in kinds.items())
        self.memory = {item: region[:size] for item, region, size in regions if region is not None}
        self.spec = spec
        self.index = index
        self.params = params
        self.rank = rank
        self.weight = self.memory[Item.WEIGHT]
        encoded = arena.of(spec.name, Item.COPY, torch.uint8) if spec.frozen_as else None
        self.codes = None if encoded is None else EncodedWeights(spec.frozen_as, encoded, spec.num_elements)  # no copy
        self.copy = self.memory.get(Item.COPY) if resting is None else resting.view(dtype)[: spec.share]
        self.parks_in_copy = parks_in_copy(spec, layout)  # the host's copy and the gradient that waits are one place
        if self.parks_in_copy:
            self.memory[Item.PARKED] = self.memory[Item.COPY]
        self.master = self.memory.get(Item.MASTER)
        self.moments, self.scales = moments_of(spec, layout, arena)
        blocks = map(FORMATS[layout.moments_as].blocks, spec.sizes)
        self.first_blocks = tuple(accumulate(blocks, initial=0))  # of each parameter, in ``scales``
        master = self.master  # in fp32; else the masters are there, too
        self._on_disk = on_disk if master is None else [stretch.of_masters(master) for stretch in on_disk]
        parts = zip(params, spec.offsets, spec.sizes, strict=True)
        homes = [self.weight[start : start + size].view(param.shape) for param, start, size in parts]
        kernels = frozenset(index for index, param in enumerate(params) if id(param) in fused)
        sole = spec.resident and self.copy is None and self.codes is None and self.master is None and spec.shards == 1
        self.views = ParameterViews(spec.params, params, homes, nan, kernels, resident=spec.resident, sole=sole)
        self.grads = GradientState(spec.params)
        self.pieces = tuple(pieces_of(spec, rank))
        self.leads = leads(spec, layout)  # ticks ahead of its use that its weight may come, in forward and in backward
        self.sources: Sequence[Tensor] = ()  # of the whole weight, a span each; none: the others' come over the network
        self.overlapping: list[BucketState] = []  # buckets whose homes overlap this one's
        self.zeros_stay: frozenset[int] = frozenset()  # parameters whose zeros are a mask
        self.replaced = 0
        self.present = False
        self.given_up = False
        self.handed_out = HandedOut(spec.params)  # views of weights that others may hold, and write to
        self.open = 0
        self.pending = Pending.NOTHING
        self.job: Job | None = None
        self.future: Future[tuple[bool, Event]] | None = None  # the worker's: whether it changed weights, and when
        self.arrived: Event | None = None
        self.used: Event | None = None
        self.stored: Event | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def settled(self) -> bool:
        return self.pending is Pending.NOTHING

    @property
    def updates_in_place(self) -> bool:
        """Whether weights and state are on the device, so that an update runs as soon as it is submitted."""
        return self.spec.site is Site.DEVICE and self.spec.resident

    @property
    def grads_on_host(self) -> bool:
        return self.spec.grad_tier is Tier.HOST

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold a span each."""
        return self.spec.shards > 1

    @property
    def copy_is_on_disk(self) -> bool:
        """Whether the host's copy is a file, which is read into COPY, a slot, on its way up."""
        return self.copy is not self.memory.get(Item.COPY)

    @property
    def new(self) -> Tensor:
        """Where the worker makes the new weight, if the weight is not the master."""
        return self.memory[Item.PARKED] if self.copy is None or self.spec.copy_on_disk else self.copy

    # --- its memory --------------------------------------------------------------------------------------------------

    def own(self, flat: Tensor) -> Tensor:
        """This rank's span of a flat view of the whole bucket."""
        return flat[self.rank * self.spec.share : (self.rank + 1) * self.spec.share]

    def pieces_in(self, indices: Container[int]) -> list[Piece]:
        return [piece for piece in self.pieces if piece.index in indices]

    def bytes_of(self, index: int) -> list[range]:
        """Where this rank's part of a parameter is in the host's copy."""
        size = self.weight.element_size()
        return [range(piece.at * size, (piece.at + piece.size) * size) for piece in self.pieces_in([index])]

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The elements of parameter ``index`` in a flat view of the whole bucket, flat."""
        assert flat.numel() == self.spec.num_elements, f"{self.name}: a span, and the whole is wanted"
        return flat[self.spec.offsets[index] :][: self.spec.sizes[index]]

    def shaped(self, flat: Tensor, index: int) -> Tensor:
        return self.part(flat, index).view(self.views.homes[index].shape)

    def gradients(self, indices: Iterable[int]) -> list[Tensor]:
        """The gradients of these parameters in the bucket's slot, in their shapes."""
        return [self.shaped(self.memory[Item.GRAD], index) for index in indices]

    def states(self) -> list[Tensor]:
        """What an update on the device needs besides the weight, in the order of the visit slot."""
        return ([] if self.master is None else [self.master]) + self.moments

    def stretches(self) -> Sequence[Stretch]:
        """Masters and moments of all of this rank's span, in order."""
        return self._on_disk or [Stretch(0, self.spec.share, self.master, self.moments, in_memory)]

    def masters(self, pieces: Iterable[Piece], *, writes: bool = False) -> Iterator[tuple[Piece, Tensor]]:
        """The masters of ``pieces``, which may be cut, to be used, or with ``writes`` changed, before the next one."""
        pieces = list(pieces)
        for stretch in self.stretches():
            fragments = [fragment for piece in pieces for fragment in piece.within(stretch)]
            if fragments and stretch.master is not None:
                with stretch.at_hand(writes=writes):
                    for fragment in fragments:
                        yield fragment, stretch.master[fragment.at - stretch.start :][: fragment.size]

    def rounded(self, piece: Piece) -> Tensor:
        weight = torch.empty(piece.size, dtype=self.weight.dtype)
        for fragment, master in self.masters([piece]):
            weight[fragment.at - piece.at :][: fragment.size].copy_(master)
        return weight

    def round_masters(self, target: Tensor) -> None:
        """Round the masters of this rank's span to compute weights, leaving out the padding."""
        for stretch in self.stretches():
            with stretch.at_hand():
                self.round_stretch(target, stretch)

    def round_stretch(self, target: Tensor, stretch: Stretch) -> None:
        """Round the masters of ``stretch``, which is at hand."""
        assert stretch.master is not None
        fragments = [fragment for piece in self.pieces for fragment in piece.within(stretch)]
        sources = [stretch.master[fragment.at - stretch.start :][: fragment.size] for fragment in fragments]
        if fragments:
            torch._foreach_copy_([target[fragment.at :][: fragment.size] for fragment in fragments], sources)

    def weight_of(self, index: int) -> Tensor:
        """The newest weight of one parameter in its shape, while no update is pending, for the host or COMPUTE to read.
        If the copy is given up it is a rounded master, which DOWN may still be writing (``stored``).
        """
        if self.codes is not None:
            return self.codes.get(self.spec.offsets[index], self.views.homes[index])
        if not self.given_up:
            return self.shaped(self.weight if self.copy is None else self.copy, index)
        assert not self.is_shared, f"{self.name}: other ranks hold parts of it"
        return self.rounded(self.pieces[index]).view(self.views.homes[index].shape)

    def measures(self, index: int) -> bool:
        """Whether this rank's slot has the whole summed gradient of a parameter."""
        return not self.is_shared or self.speaker(index) == self.rank

    def speaker(self, index: int) -> int:
        """The rank that tells the others about a parameter: its owner, or the first of them."""
        return min(self.spec.offsets[index] // self.spec.share, self.spec.shards - 1)

    @torch.no_grad()
    def take_in(self) -> None:
        """Copy the model's own weights to their places; afterwards the model's own memory is free."""
        values = dict(enumerate(param.detach().reshape(-1) for param in self.params))
        for index, value in values.items():
            self.put_codes(index, value)
            if self.copy is None and self.codes is None:
                self.part(self.weight, index).copy_(self.as_kept(value))
        if self.copy is not None and not self.given_up:
            self.fill(self.copy, values)
        self.fill_masters(values)
        for index, param in enumerate(self.params):
            put(param, self.views.absent(index))
        if self.spec.site is Site.DEVICE:
            for moment in self.moments:
                moment.zero_()  # new pages of the host are zero
        if Item.STEPS in self.memory:
            self.memory[Item.STEPS].zero_()
        self.views.unbind()
        if self.spec.resident:
            self.present = True
            self.views.show()

    def touch_state(self) -> None:
        """Zero the moments on the host, new memory that nobody has touched, in the thread and the pieces in which they
        are updated: the system puts a page beside the core that touches it first.
        """
        for flat in self.moments if self.spec.site is not Site.DEVICE else []:
            for chunk in flat.split(HOST_CHUNK):
                chunk.zero_()

    def put_codes(self, index: int, value: Tensor) -> None:
        """Encode a whole parameter, if it rests so."""
        if self.codes is not None:
            self.codes.put(self.spec.offsets[index], value)

    def as_kept(self, value: Tensor) -> Tensor:
        """What forward sees of ``value``: it is rounded once, if the weight rests in a format of its own."""
        return once_encoded(value, self.spec.frozen_as) if self.spec.frozen_as else value

    def fill(self, span: Tensor, values: Mapping[int, Tensor]) -> None:
        """Copy flat whole parameters, given by their indices, into ``span``, as far as they are in this rank's."""
        for piece in self.pieces_in(values):
            span[piece.at : piece.at + piece.size].copy_(values[piece.index][piece.start : piece.stop])

    def fill_masters(self, values: Mapping[int, Tensor]) -> None:
        """Copy flat whole parameters, given by their indices, into the masters, if there are any."""
        for fragment, master in self.masters(self.pieces_in(values), writes=True):
            master.copy_(values[fragment.index][fragment.start : fragment.stop])

    def read_exact(self, value: Tensor, index: int) -> None:
        """Copy this rank's part of a parameter into ``value``, the whole of it, flat: of its master, if it has one."""
        span = self.own(self.weight) if self.copy is None else self.copy
        if self.codes is not None:
            value.copy_(self.weight_of(index).view(-1))
        for piece in self.pieces_in([index] if self.codes is None else ()):
            if self.stretches()[0].master is None:
                value[piece.start : piece.stop].copy_(span[piece.at : piece.at + piece.size])
            for fragment, master in self.masters([piece]):
                value[fragment.start : fragment.stop].copy_(master)

    def written_unseen(self) -> str | None:
        """A parameter whose weight differs from place to place, while no update is pending and all copies are made: one
        place was written to by its address. For debugging; what is not whole in memory is left out.
        """
        if not self.settled or self.codes is not None or self.spec.on_disk:
            return None
        home = self.own(self.weight) if self.present else None
        copy = None if self.given_up else self.copy
        for piece in self.pieces_in(self.views.own):
            places = [flat[piece.at : piece.at + piece.size] for flat in (home, copy) if flat is not None]
            places += [self.rounded(piece)] if self.stretches()[0].master is not None else []
            if any(not same_bits(place.cpu(), places[0].cpu()) for place in places[1:]):
                return self.spec.params[piece.index]
        return None

    # --- the home ----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """The home is this bucket's from now on; UP may write it."""
        self.present = True

    def vacate(self) -> None:
        self.views.unbind()
        self.present = False

    def enter(self, times: int = 1) -> None:
        self.open += times

    def leave(self) -> None:
        self.open -= 1

    # --- the host's copy ---------------------------------------------------------------------------------------------

    def hand_out(self, view: Tensor, index: int, *, is_weight: bool = True) -> None:
        """``view``, made from ``weight_of``, is given to somebody who may hold it and write to it. Other ranks would
        not know of that, nor what to do with one that is a module's own idea of a weight.
        """
        is_tracked = is_weight and not self.is_shared
        is_copy = self.given_up or self.codes is not None or not is_tracked
        self.handed_out.add(view, index, self.replaced if is_tracked else -1, is_copy=is_copy)

    def give_up_copy(self) -> None:
        """DOWN is about to write gradients to the place of the host's copy."""
        self.handed_out.keep_values(self.name)
        self.given_up = True

    def restored(self) -> None:
        """The host's copy is the rounded master again."""
        self.given_up = False
        self.replaced += 1

    def load(self) -> None:
        self.replaced += 1
        self.handed_out.renew(self.replaced - 1, self.replaced)

    def keep_zeros(self, index: int) -> None:
        self.zeros_stay |= {index}

    # --- updates -----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """An update is pending: the parameters are absent until it is settled, unless it begins at once."""
        assert self.settled, f"{self.name} has an update that was not settled"
        self.job = job
        self.replaced += 1
        self.views.begin_update(job.touched)
        on_host = self.spec.site is Site.HOST
        self.pending = Pending.HOST if on_host else Pending.DEVICE
        if on_host and not self.spec.resident:
            self.vacate()
        elif not self.updates_in_place:
            self.views.unbind()

    def begin_visit(self, *, arrived: Event) -> None:
        """UP has been given everything that the pending update needs on the device."""
        self.arrived = arrived
        self.pending = Pending.VISITING

    def settled_on_device(self, *, used: Event) -> None:
        """COMPUTE has been given the update; the home holds the newest weights."""
        self.used = used
        self.pending = Pending.NOTHING
        self.job = None

    def write_back(self, *, stored: Event) -> None:
        """DOWN has been given the copies of what the update wrote, the host's copy among it if there is one."""
        self.stored = stored
        self.given_up = False

    def settled_on_host(self) -> None:
        """The worker has computed the update, and written the host's copy if the gradient was in its place."""
        self.pending = Pending.NOTHING
        self.job = None
        self.future = None
        self.given_up = False

    def refuse_loans(self) -> None:
        """Raise RuntimeError if a parameter is on loan when an update is to begin."""
        if len(self.views.own) < len(self.params):
            where = "inside of `with optimizer.present(...)`"
            raise RuntimeError(f"{self.name}: backward {where}, and the plan updates there")


def moments_of(spec: Bucket, layout: Layout, arena: Arena) -> tuple[list[Tensor], list[Tensor]]:
    """Each moment of the span, flat: numbers in fp32, else the bytes of codes; and their scales, if there are any."""
    rests = FORMATS[layout.moments_as]
    region = arena.of(spec.name, Item.MOMENTS, torch.uint8)
    if region is None:
        return [], []
    codes = region[: layout.moments * rests.code_bytes(spec.share)]
    if layout.moments_as == "fp32":
        return list(codes.view(torch.float32).view(layout.moments, spec.share)), []
    scales = arena.of(spec.name, Item.SCALES, STATE[layout.moments_as].scale) if rests.block else None
    return list(codes.view(layout.moments, -1)), [] if scales is None else list(scales.view(layout.moments, -1))


def find_overlapping(buckets: list[BucketState], arena: Arena) -> None:
    """Fill in which homes overlap. Residents overlap none."""
    spots = {bucket.name: arena.addresses.of(bucket.name, Item.WEIGHT) for bucket in buckets}
    for bucket in buckets:
        bucket.overlapping = [
            other for other in buckets if other is not bucket and spots[bucket.name].overlaps(spots[other.name])
        ]


class BucketOf(dict[int, tuple[BucketState, int]]):
    """The bucket of each parameter, by the parameter's id, and its index in the bucket."""

    def __missing__(self, param: int) -> tuple[BucketState, int]:
        raise RuntimeError(
            "a parameter of this model is not the one that was stowed: model.to(), to_empty() or an assignment has "
            "put another in its place; close() the optimizer before such changes"
        )
