"""Places: where each bucket's optimizer state rests, where its gradient waits and who updates it, and what that takes.

A placement is one ``Place`` per bucket; ``Places`` knows which of them the options leave open, and counts the bytes of
a placement without placing it. ``ladder`` has those that stream nothing, from the one that moves the least: first
optimizer state goes to the host, where the CPU updates it, then gradients; last units first, because backward finishes
them first. A bucket whose state rests on the device keeps its weight there too, unless both are forced by options.
Streamed updates, whose state visits the device, are from "Deep Optimizer States" (arXiv 2410.21316).

A gradient of embedding or head is there twice for a moment: where backward made it, and in its slot, which no block's
gradient needs as large. Where memory is scarce it goes down from where backward made it (``direct``). That memory is
then free when the copy is done and not before, so the device waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, TypeAlias

from deepstow.strategies.core.facts import Facts, Tier, UnitKind
from deepstow.strategies.core.layout import (
    Item,
    Layout,
    Reduction,
    Site,
    aligned,
    needs,
    received_bytes,
    scratch_of,
    ticks_of,
    uses,
)
from deepstow.strategies.planner.addresses import held_bytes, size_classes
from deepstow.strategies.planner.buckets import capacity, form, offloadable


class Place(NamedTuple):
    """Where a bucket's state rests, where its gradient waits, whether each rank then has its span of it alone,
    whether it goes there without a slot, whether an update in backward takes it there, and whether state that the host
    updates, or a frozen weight that leaves, rests on the disk, and whether a trained weight that leaves does."""

    site: Site
    grad_tier: Tier = Tier.DEVICE
    grad_split: bool = False
    grad_direct: bool = False
    grad_taken: bool = False
    on_disk: bool = False
    copy_on_disk: bool = False


Placement: TypeAlias = tuple[Place, ...]  # one place per bucket
ON_DEVICE = (Site.DEVICE, Site.STREAMED)
PASSING: Mapping[Item, Tier] = {  # in slots
    Item.GRAD: Tier.DEVICE, Item.VISIT: Tier.DEVICE, Item.ARRIVAL: Tier.HOST, Item.PARKED: Tier.HOST,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRequest:
    """The options of ``strategies.offload``. Budgets in bytes; ``gpu_memory`` and ``host_memory`` as they were written.

    ``prefetch`` is how many ticks ahead of its use a weight comes at most; None: as early as memory allows. ``shards``:
    how many ranks hold a span of each bucket, ``splits_gradients`` whether of gradients on the device as well, and
    ``reduction`` how they add gradients; ``common_host``: they read weights out of each other's host memory.
    ``moments_as``: how moments rest; ``rounds``: weights in bf16 are their own masters; ``frozen_as``: the format
    in which frozen matrices travel. ``disk`` are folders for state, one on each drive, which may take ``disk_bytes``
    there together. What is in ``decided`` does not follow from options.
    """

    device_bytes: int
    host_bytes: int
    gpu_memory: object
    host_memory: object
    bucket_bytes: int | None = None
    prefetch: int | None = None
    in_backward: bool = False
    site: Literal["auto", "device", "host", "streamed"] = "auto"
    weights: Literal["auto", "resident", "streamed"] = "auto"
    gradients: Literal["auto", "device", "host", "passing"] = "auto"
    shards: int = 1
    splits_gradients: bool = False
    common_host: bool = False
    reduction: Reduction = "exact"
    moments_as: str = "fp32"
    rounds: bool = False
    frozen_as: str = ""
    disk: tuple[str, ...] = ()
    disk_checksums: bool = True
    disk_bytes: int = 0
    decided: frozenset[str] = frozenset()


class Sizes(NamedTuple):
    """Bytes of a placement: on the device of weights that may be offloaded (``weights``), the most of them that one
    unit needs (``largest_unit``), what is added if any is (``codes``), and all else (``rest``); on the host while no
    weight is offloaded (``host``, with slots for those on the disk), and what is added there if all are (``copies``),
    but for slots."""

    weights: int
    largest_unit: int
    codes: int
    rest: int
    host: int
    copies: int

    @property
    def device(self) -> int:
        return self.weights + self.rest

    def room(self, device_room: int) -> int:
        """What is left of so much for the weights that may be offloaded: less if one has to be."""
        spare = device_room - self.rest
        return spare if self.weights <= spare else spare - self.codes


class _Cost(NamedTuple):
    """One bucket at one place: bytes that it holds all the time while its weight stays, ``copy`` bytes on the host that
    are added if its weight leaves, what of it uses slots, in bytes, the elements that use scratch, if its state is on
    the disk, how many pieces of what size, and if its weight may be there, the bytes of a slot for it."""

    device: int
    host: int
    copy: int
    passing: tuple[tuple[Item, int], ...]
    scratch: int
    window: tuple[int, int]
    ring: int


@dataclass(frozen=True, slots=True)
class Movable:
    """A weight that may be offloaded: its bytes, what its copy takes on the host, and the ticks that use it."""

    index: int
    num_bytes: int
    copy_bytes: int
    ticks: tuple[int, ...]


class Places:
    """What a request allows. ``choices``: the places of each bucket, from what moves the least; ``blocks``: buckets of
    blocks whose weights may be offloaded; ``direct``: buckets whose gradients may do without a slot.

    Args:
        bucket_bytes: the capacity of buckets, if the request leaves it open; None: what is fastest to copy.
        direct: gradients of embedding and head that wait on the host, for updates there, have no slot.
    """

    def __init__(
        self, facts: Facts, request: OffloadRequest, bucket_bytes: int | None = None, *, direct: bool = False
    ) -> None:
        self.request = request
        size = request.bucket_bytes or bucket_bytes or capacity(facts)
        self.buckets = form(facts, size, request.shards, frozen_as=request.frozen_as)
        if request.rounds:
            trained = [bucket.group is not None and bucket.dtype == "bfloat16" for bucket in self.buckets]
            self.buckets = tuple(replace(b, rounds=rounds) for b, rounds in zip(self.buckets, trained, strict=True))
        movable = offloadable(facts, self.buckets, size)
        streams, auto = request.weights == "streamed", request.site == "auto"
        stays, bound = request.weights == "resident", request.site == "device"
        self.blocks = [] if stays else [i for i in movable.blocks if streams or not bound or self._is_frozen(i)]
        self._ends = [] if stays else [i for i in movable.ends if not bound or self._is_frozen(i)]
        self._may_leave = dict.fromkeys((*self.blocks, *self._ends))
        self._leave_anyway = set(self.blocks) if streams else set[int]()
        self._sendable = set(movable.gradients)
        self._hosted_always = self._leave_anyway if auto else set[int]()
        names = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
        self.of_blocks = {i for i, bucket in enumerate(self.buckets) if set(bucket.units) <= names}
        one_rank = request.shards == facts.run.adding_copies == 1
        ends = self._sendable - self.of_blocks if direct and one_rank and request.site in ("auto", "host") else ()
        self.direct = {index for index in ends if not self._is_frozen(index)}
        # Several micro-batches are summed before the ranks are, as torch's data parallelism does.
        splits = request.splits_gradients and request.shards > 1 and facts.run.accumulation == 1
        self._split = self._sendable & self.of_blocks if splits else set[int]()
        self._sends_early = request.gradients in ("auto", "passing") and facts.run.accumulation == 1
        # Of several micro-batches, only what waits on the device passes the host once.
        self._may_send = request.gradients != "device" and (request.gradients != "passing" or self._sends_early)
        shared = Counter(unit for bucket in self.buckets for unit in bucket.units)  # come in turn
        taken = [(i, self.buckets[i]) for i in self.of_blocks if request.gradients == "passing"]  # ends gain nothing
        taken = [(i, b) for i, b in taken if request.disk or not b.mixed]  # whose copy has the gradient's place
        self._taken = {i for i, b in taken if 1 in (len(b.units), max(shared[u] for u in b.units))}
        self.choices = [tuple(self._choices(index)) for index in range(len(self.buckets))]
        # One more than a block has, so that its backward does not wait for the gradients of the one before.
        passing = Counter(self.buckets[index].units[0] for index in self._sendable)
        self.empty = Layout(
            buckets=(),
            units=tuple(unit.name for unit in facts.units),
            in_backward=request.in_backward,
            accumulation=facts.run.accumulation,
            max_grad_norm=facts.run.max_grad_norm,
            moments=facts.run.moments,
            moments_as=request.moments_as,
            grad_slots=1 + max(passing.values(), default=1),
            common_host=request.common_host,
            reduction=request.reduction,
            disk=request.disk,
            disk_checksums=request.disk_checksums,
        )
        ticks = ticks_of(self.empty.units)
        everything = replace(self.empty, buckets=self.buckets)
        self._received = received_bytes(everything)
        leaving = (replace(self.buckets[index], resident_ticks=((0, 1),)) for index in self._may_leave)
        self._codes = aligned(replace(self.empty, buckets=tuple(leaving)).codes_bytes)
        self._expanded = aligned(everything.expanded_bytes, Tier.HOST)
        self._weights = [aligned(bucket.weight_bytes) for bucket in self.buckets]
        self.ticks = [uses(bucket, ticks) for bucket in self.buckets]
        shapes: dict[tuple[object, ...], int] = {}
        self._like = [  # per bucket, the first one that takes the same memory at the same place
            shapes.setdefault((bucket.num_elements, bucket.dtype, len(bucket.params)), index)
            for index, bucket in enumerate(self.buckets)
        ]
        self._bucket = cache(lambda index, place: replace(self.buckets[index], **place._asdict()))
        self._costs, self.nearest = cache(self._cost), cache(self._nearest)
        self.sizes, self.ladder = cache(self._sizes), cache(self._ladder)

    def _is_frozen(self, index: int) -> bool:
        return self.buckets[index].group is None

    def _choices(self, index: int) -> Iterator[Place]:
        """The places of one bucket: device, host, streamed, each first with the gradient on the device."""
        site = self.request.site
        if self._is_frozen(index):
            yield Place(Site.NONE)
            return
        sites = [Site(site)] if site != "auto" else [Site.DEVICE, Site.HOST, Site.STREAMED]
        for option in sites:
            if site == "auto" and option is Site.DEVICE and index in self._hosted_always:
                continue
            sends = index in self._sendable and option is not Site.DEVICE and self._may_send
            forced = self.request.gradients == "host" or (self._sends_early and option is Site.HOST)
            taken = index in self._taken and option is Site.HOST
            if not (sends and forced):
                yield Place(option, grad_split=index in self._split and option in ON_DEVICE, grad_taken=taken)
            if sends:
                direct = index in self.direct and option is Site.HOST
                yield Place(option, Tier.HOST, grad_direct=direct, grad_taken=taken)

    def _ladder(self) -> list[Placement]:
        """Placements that stream nothing unless they have to, from what moves the least to what moves the most."""
        places = [choices[0] for choices in self.choices]
        rungs = [tuple(places)]
        for tier in (Tier.DEVICE, Tier.HOST):  # first states, then gradients
            for index in reversed(range(len(places))):
                choices = self.choices[index]
                usual = [place for place in choices if place.site is not Site.STREAMED] or choices
                to = usual[-1] if tier is Tier.HOST else next((p for p in usual if p.site is Site.HOST), usual[0])
                if to != places[index]:
                    places[index] = to
                    rungs.append(tuple(places))
        return rungs

    def _nearest(self, index: int, site: Site, tier: Tier) -> Place:
        """The choice of a bucket that is most like ``site``, then ``tier``."""
        order = [site, Site.HOST, Site.STREAMED, Site.DEVICE, Site.NONE]
        return min(self.choices[index], key=lambda one: (order.index(one.site), one.grad_tier is not tier))

    def streamed(self, placement: Placement) -> Placement:
        """``placement`` with all host updates of blocks streamed that may be; gradients wait where they did, if they
        may. Embedding and head are large: slots for their state would cost more memory than they free.
        """
        visits = (self.nearest(index, Site.STREAMED, at.grad_tier) for index, at in enumerate(placement))
        pairs = enumerate(zip(placement, visits, strict=True))
        return tuple(
            to if index in self.of_blocks and at.site is Site.HOST and to.site is Site.STREAMED else at
            for index, (at, to) in pairs
        )

    @property
    def without_visiting_ends(self) -> list[tuple[Place, ...]]:
        """The choices of which the state of embedding and head visits only if it has to."""
        return [
            choices
            if index in self.of_blocks
            else tuple(at for at in choices if at.site is not Site.STREAMED) or choices
            for index, choices in enumerate(self.choices)
        ]

    def offloadable(self, placement: Placement) -> list[int]:
        """Buckets whose weights may be offloaded."""
        return [index for index in self._may_leave if self.may_leave(index, placement[index])]

    def may_leave(self, index: int, place: Place) -> bool:
        """Whether the weight of a bucket may be offloaded from there."""
        return index in self._may_leave and (place.site is not Site.DEVICE or index in self._leave_anyway)

    def hosted(self, index: int, place: Place) -> int:
        """Bytes of the host that a bucket whose weight is away has outside of slots."""
        cost = self._costs(self._like[index], place)
        return cost.host + cost.copy

    def layout(self, placement: Placement) -> Layout:
        """All buckets as ``placement`` places them, every weight resident."""
        return replace(self.empty, buckets=tuple(map(self._bucket, range(len(placement)), placement)))

    def like(self, other: Places, placement: Placement) -> Placement:
        """The places that the parameters have in ``placement`` of ``other`` buckets, as far as they may."""
        if other is self:
            return placement
        theirs = {name: at for bucket, at in zip(other.buckets, placement, strict=True) for name in bucket.params}
        places = (theirs[bucket.params[len(bucket.params) // 2]] for bucket in self.buckets)
        return tuple(self.nearest(index, at.site, at.grad_tier) for index, at in enumerate(places))

    def alike(self, placement: Placement) -> Mapping[tuple[int, Place], int]:
        """How many buckets are like the one of an index, at one place."""
        return Counter(zip(self._like, placement, strict=True))

    def movable(self, placement: Placement) -> list[Movable]:
        """The weights that may be offloaded."""
        copies = {index: self._costs(self._like[index], placement[index]).copy for index in self.offloadable(placement)}
        return [Movable(index, self._weights[index], copy, self.ticks[index]) for index, copy in copies.items()]

    @cached_property
    def least_bytes(self) -> int:
        """Bytes of all memories together that no placement takes less than: those of the state, without slots."""
        return sum(
            min(self._least_of(index, place, leaves=index in self._may_leave) for place in choices)
            for index, choices in enumerate(self.choices)
        )

    def _least_of(self, index: int, place: Place, *, leaves: bool) -> int:
        cost = self._costs(self._like[index], place)
        return cost.device + cost.host + min(0, cost.copy - self._weights[index] if leaves else 0)

    def _sizes(self, placement: Placement) -> Sizes:
        """What ``place`` finds for the layout, much faster: ``weights + rest`` on the device, ``host`` on the host."""
        device = mixed = pieces = piece_bytes = 0
        host = self._expanded
        passed: dict[Item, Counter[int]] = {item: Counter() for item in PASSING}
        for (index, place), number in self.alike(placement).items():
            cost = self._costs(index, place)
            device = device + number * cost.device
            host = host + number * cost.host
            mixed = max(mixed, cost.scratch)
            pieces, piece_bytes = pieces + number * cost.window[0], max(piece_bytes, cost.window[1])
            for item, size in cost.passing:
                passed[item][size] += number
        host += min(self.empty.window_slots, pieces) * piece_bytes
        for item, sizes in passed.items():
            slots = sum(size * number for size, number in size_classes(sizes, self.empty.slots(item)))
            device, host = (device + slots, host) if PASSING[item] is Tier.DEVICE else (device, host + slots)
        units: dict[str, int] = {}
        leaving = self.offloadable(placement)
        for index in leaving:
            for unit in self.buckets[index].units:
                units[unit] = units.get(unit, 0) + self._weights[index]
        weights = sum(self._weights[index] for index in leaving)
        rings = Counter(self._costs(self._like[i], placement[i]).ring for i in leaving if placement[i].on_disk)
        rings.pop(0, None)
        host += sum(size * number for size, number in size_classes(rings, self.empty.slots(Item.COPY)))
        rest = device - weights + scratch_of([mixed]) + self._received
        copies = sum(self._costs(self._like[index], placement[index]).copy for index in leaving)
        return Sizes(weights, max(units.values(), default=0), self._codes, rest, host, copies)

    def _cost(self, index: int, place: Place) -> _Cost:
        bucket = self._bucket(index, place)
        offloaded = replace(bucket, resident_ticks=((0, 1),))
        stays, leaves = ([*needs(b, self.empty)] for b in (bucket, offloaded))
        host = held_bytes(stays, Tier.HOST)
        return _Cost(
            device=held_bytes(stays, Tier.DEVICE),
            host=host,
            copy=held_bytes(leaves, Tier.HOST) - host,
            passing=tuple((need.item, aligned(need.num_bytes, need.tier)) for need in stays if need.passes),
            scratch=bucket.share if bucket.mixed and place.site in ON_DEVICE else 0,
            window=self.empty.window_of(bucket) if bucket.state_on_disk else (0, 0),
            ring=sum(aligned(n.num_bytes, n.tier) for n in leaves if bucket.weight_on_disk and n.item is Item.COPY),
        )
