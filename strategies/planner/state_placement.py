"""State placements: where optimizer state rests, where gradients wait, and who updates; all weights on the device.

Placements are ordered from the one that moves the least to the one that moves the most, one bucket at a time:

1. optimizer state to the host, where the CPU updates it; last units first, because backward finishes them first. With
   one micro-batch per update their gradients wait on the host as well.
2. gradients of those buckets to the host; last units first.

In addition, a part of the blocks' host updates may be streamed through the device, spread evenly, so that the CPU's
memory and the link both work (from "Deep Optimizer States", arXiv 2410.21316). A bucket whose state rests on the device
keeps its weight there too, unless both are forced by options.

A gradient of embedding or head is there twice for a moment: where backward made it, and in its slot, which no block's
gradient needs as large. Where memory is scarce it goes down from where backward made it (``direct``). That memory is
then free when the copy is done and not before, so the device waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from strategies.core.facts import Facts, Home, UnitKind
from strategies.core.layout import (
    Bucket,
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
from strategies.planner.addresses import size_classes
from strategies.planner.buckets import capacity, form, offloadable


class Place(NamedTuple):
    """Where a bucket's state rests, where its gradient waits, whether each rank then has its span of it alone, and
    whether it goes there without a slot."""

    site: Site
    grad_home: Home
    grad_split: bool = False
    grad_direct: bool = False


ON_DEVICE = (Site.DEVICE, Site.STREAMED)
# The same objects for all buckets: a search places them many million times.
STAYS = {site: Place(site, Home.DEVICE) for site in Site}
LEAVES = {site: Place(site, Home.HOST) for site in Site}
DIRECT = {site: Place(site, Home.HOST, grad_direct=site is Site.HOST) for site in Site}
SPLITS = {site: Place(site, Home.DEVICE, grad_split=True) for site in Site}
PASSING: Mapping[Item, Home] = {Item.GRAD: Home.DEVICE, Item.VISIT: Home.DEVICE, Item.ARRIVAL: Home.HOST}  # in slots
REMEMBERED = 32  # placements of which the places are remembered
PARTS = 8  # shares of host updates that may be streamed: none, one eighth, ... all


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRequest:
    """The options of ``strategies.offload``. Budgets in bytes; ``gpu_memory`` and ``host_memory`` as they were written.

    ``prefetch`` is how many ticks ahead of its use a weight comes at most; None: as early as memory allows. ``ways`` is
    how many ranks hold a span of each bucket, ``splits_gradients`` whether of gradients on the device as well, and
    ``reduction`` how they add gradients; ``common_host``: they read weights out of each other's host memory.
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
    gradients: Literal["auto", "device", "host"] = "auto"
    keeps_copies: bool = True
    ways: int = 1
    splits_gradients: bool = False
    common_host: bool = False
    reduction: Reduction = "exact"


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Numbers of buckets with state on the host and with gradients there, and the eighths of the blocks' host updates
    that are streamed."""

    hosted: int
    grads_down: int
    eighths: int = 0


class Sizes(NamedTuple):
    """Bytes of a placement: on the device of weights that may be offloaded (``weights``), the most of them that one
    unit needs (``largest_unit``), and all else (``rest``); on the host while no weight is offloaded (``host``)."""

    weights: int
    largest_unit: int
    rest: int
    host: int

    @property
    def device(self) -> int:
        return self.weights + self.rest


class _Hosted(NamedTuple):
    """With so many states on the host: the site of each bucket before host updates are streamed, and which weights may
    be offloaded, with their bytes and the most that one unit needs."""

    sites: list[Site]
    offloadable: list[int]
    weights: int
    largest_unit: int


class _Cost(NamedTuple):
    """One bucket at one place.

    Args:
        device, host: bytes that it holds all the time while its weight stays.
        copy: bytes on the host that are added if its weight leaves.
        passing: what of it uses slots, in bytes.
        scratch: elements that use scratch.
    """

    device: int
    host: int
    copy: int
    passing: tuple[tuple[Item, int], ...]
    scratch: int


@dataclass(frozen=True, slots=True)
class Movable:
    """A weight that may be offloaded: its bytes, what its copy takes on the host, and the ticks that use it."""

    index: int
    num_bytes: int
    copy_bytes: int
    ticks: tuple[int, ...]


class StatePlacements:
    """The placements that a request allows. ``weights`` and ``ticks``: per bucket, its weight's bytes on the device and
    the ticks that use it. ``direct``: buckets whose gradients may do without a slot.

    Args:
        bucket_bytes: the capacity of buckets, if the request leaves it open; None: what is fastest to copy.
        direct: gradients of embedding and head that wait on the host, for updates there, have no slot.
    """

    def __init__(
        self, facts: Facts, request: OffloadRequest, bucket_bytes: int | None = None, *, direct: bool = False
    ) -> None:
        self._request, self.bucket_bytes = request, bucket_bytes
        size = request.bucket_bytes or bucket_bytes or capacity(facts)
        self._buckets = form(facts, size, request.ways)
        movable = offloadable(facts, self._buckets, size)
        streams, auto = request.weights == "streamed", request.site == "auto"
        self.blocks = self._free(movable.blocks, even_if=streams)
        self._ends = self._free(movable.ends)
        self._sendable = set(movable.gradients)
        self._hosted_always = set(self.blocks) if streams and auto else set[int]()
        trainable = [index for index, bucket in enumerate(self._buckets) if bucket.group is not None]
        self._hostable = [index for index in trainable if index not in self._hosted_always] if auto else []
        self._sends_early = request.gradients == "host" or (request.gradients == "auto" and facts.run.accumulation == 1)
        names = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
        # Embedding and head are large: slots for their state, or gradients, would cost more memory than they free.
        self._streamable = [i for i, bucket in enumerate(self._buckets) if set(bucket.units) <= names]
        self.direct = set(self._without_slots(facts)) if direct else set[int]()
        # Several micro-batches are summed before the ranks are, as torch's data parallelism does.
        splits = request.splits_gradients and request.ways > 1 and facts.run.accumulation == 1
        self._shared = self._sendable.intersection(self._streamable) if splits else set[int]()
        last = max((at for at, index in enumerate(self._hostable) if index in set(self._streamable)), default=-1)
        always = not self._hosted_always.isdisjoint(self._streamable)
        self._streams_from = 0 if always else len(self._hostable) - last  # with so many hosted, some may be streamed
        # One more than a block has, so that its backward does not wait for the gradients of the one before.
        passing = Counter(self._buckets[index].units[0] for index in self._sendable)
        self._empty = Layout(
            buckets=(),
            units=tuple(unit.name for unit in facts.units),
            in_backward=request.in_backward,
            accumulation=facts.run.accumulation,
            max_grad_norm=facts.run.max_grad_norm,
            moments=facts.run.moments,
            grad_slots=1 + max(passing.values(), default=1),
            keeps_copies=request.keeps_copies,
            common_host=request.common_host,
            reduction=request.reduction,
        )
        ticks = ticks_of(self._empty.units)
        self._received = received_bytes(replace(self._empty, buckets=self._buckets))
        self.weights = [aligned(bucket.weight_bytes) for bucket in self._buckets]
        self.ticks = [uses(bucket, ticks) for bucket in self._buckets]
        shapes: dict[tuple[object, ...], int] = {}
        self._like = [  # per bucket, the first one that takes the same memory at the same place
            shapes.setdefault((bucket.num_elements, bucket.dtype, len(bucket.params)), index)
            for index, bucket in enumerate(self._buckets)
        ]
        self._with_hosted = cache(self._hosted)
        self._places = lru_cache(REMEMBERED)(self._places_of)
        self._movable = cache(self._movable_at)
        self._costs = cache(self._cost)
        self.sizes = cache(self._sizes)

    def _without_slots(self, facts: Facts) -> Iterator[int]:
        """Buckets of embedding and head whose gradients no update on the device, and no other rank, reads in a slot."""
        if self._request.site in ("auto", "host") and self._request.ways == facts.run.replicas == 1:
            others = self._sendable.difference(self._streamable)
            yield from (index for index in others if self._buckets[index].group is not None)

    def _free(self, indices: list[int], *, even_if: bool = False) -> list[int]:
        """Those of ``indices`` whose state may rest where their weight does not."""
        if self._request.weights == "resident":
            return []
        bound = self._request.site == "device" and not even_if
        return [index for index in indices if not bound or self._buckets[index].group is None]

    def all(self) -> list[StatePlacement]:
        """All placements without streaming beyond the request, from what moves the least to what moves the most."""
        found = [StatePlacement(hosted, 0) for hosted in range(len(self._hostable) + 1)]
        most = len(self._choice_of_grads(self._with_hosted(found[-1].hosted).sites))
        return found + [replace(found[-1], grads_down=number) for number in range(1, most + 1)]

    def with_streaming(self, placement: StatePlacement) -> Iterator[StatePlacement]:
        """``placement``, and the same with host updates streamed."""
        yield placement
        if self.may_stream(placement):
            yield from (replace(placement, eighths=eighths) for eighths in range(1, PARTS + 1))

    def may_stream(self, placement: StatePlacement) -> bool:
        """Whether there are host updates that may be streamed."""
        return self._request.site == "auto" and placement.hosted >= self._streams_from

    def offloadable(self, placement: StatePlacement) -> Sequence[int]:
        """Buckets whose weights may be offloaded."""
        return self._with_hosted(placement.hosted).offloadable

    def _hosted(self, number: int) -> _Hosted:
        there, site = self._on_host(number), self._request.site
        forced = None if site == "auto" else Site(site)
        sites = [
            Site.NONE if bucket.group is None else forced or (Site.HOST if index in there else Site.DEVICE)
            for index, bucket in enumerate(self._buckets)
        ]
        streams = self._request.weights == "streamed"
        blocks = [index for index in self.blocks if streams or sites[index] is not Site.DEVICE]
        offloadable = blocks + [index for index in self._ends if sites[index] is not Site.DEVICE]
        sums: Counter[str] = Counter()
        for index in offloadable:
            for unit in self._buckets[index].units:
                sums[unit] += self.weights[index]
        leaving = sum(self.weights[index] for index in offloadable)
        return _Hosted(sites, offloadable, leaving, max(sums.values(), default=0))

    def layout(self, placement: StatePlacement) -> Layout:
        """All buckets as ``placement`` places them, every weight resident."""
        pairs = self.placed(placement)
        return replace(self._empty, buckets=tuple(replace(bucket, **place._asdict()) for bucket, place in pairs))

    def placed(self, placement: StatePlacement) -> Iterator[tuple[Bucket, Place]]:
        """Each bucket with its site and the home of its gradients."""
        return zip(self._buckets, self._places(placement), strict=True)

    def movable(self, placement: StatePlacement) -> list[Movable]:
        """The weights that may be offloaded."""
        places, movable = self._places(placement), self._movable
        return [movable(index, places[index]) for index in self.offloadable(placement)]

    def _movable_at(self, index: int, place: Place) -> Movable:
        return Movable(index, self.weights[index], self._costs(self._like[index], place).copy, self.ticks[index])

    def _sizes(self, placement: StatePlacement) -> Sizes:
        """What ``place`` finds for the layout, much faster: ``weights + rest`` on the device, ``host`` on the host."""
        device = host = mixed = 0
        passed: dict[Item, Counter[int]] = {item: Counter() for item in PASSING}
        for (index, place), number in Counter(zip(self._like, self._places(placement), strict=True)).items():
            cost = self._costs(index, place)
            device, host, mixed = device + number * cost.device, host + number * cost.host, max(mixed, cost.scratch)
            for item, size in cost.passing:
                passed[item][size] += number
        for item, sizes in passed.items():
            slots = sum(size * number for size, number in size_classes(sizes, self._empty.slots(item)))
            device, host = (device + slots, host) if PASSING[item] is Home.DEVICE else (device, host + slots)
        _, _, weights, largest = self._with_hosted(placement.hosted)
        return Sizes(weights, largest, device - weights + scratch_of([mixed]) + self._received, host)

    def _cost(self, index: int, place: Place) -> _Cost:
        bucket = replace(self._buckets[index], **place._asdict())
        stays, leaves = (
            [(need, aligned(need.num_bytes, need.home)) for need in needs(one, self._empty)]
            for one in (bucket, replace(bucket, resident_ticks=((0, 1),)))
        )
        host, away = (
            sum(size for need, size in found if not need.passes and need.home is Home.HOST) for found in (stays, leaves)
        )
        return _Cost(
            device=sum(size for need, size in stays if not need.passes and need.home is Home.DEVICE),
            host=host,
            copy=away - host,
            passing=tuple((need.item, size) for need, size in stays if need.passes),
            scratch=bucket.share if bucket.mixed and place.site in ON_DEVICE else 0,
        )

    def _places_of(self, placement: StatePlacement) -> list[Place]:
        sites = list(self._with_hosted(placement.hosted).sites)
        either = self._choice_of_grads(sites)
        down = set(either[len(either) - placement.grads_down :])
        if self._sends_early:
            early = {Site.HOST, Site.STREAMED} if self._request.gradients == "host" else {Site.HOST}
            down |= {index for index in self._sendable if sites[index] in early}
        for index in self._streaming(placement):
            sites[index] = Site.STREAMED
        places = [STAYS[site] for site in sites]
        for index in down:
            places[index] = (DIRECT if index in self.direct else LEAVES)[sites[index]]
        for index in self._shared - down:
            if sites[index] in ON_DEVICE:
                places[index] = SPLITS[sites[index]]
        return places

    def _on_host(self, number: int) -> set[int]:
        return self._hosted_always | set(self._hostable[len(self._hostable) - number :])

    def _choice_of_grads(self, sites: Sequence[Site]) -> list[int]:
        """Buckets whose gradients may wait at either home, in order."""
        if self._request.gradients != "auto":
            return []
        free = {Site.STREAMED} if self._sends_early else {Site.STREAMED, Site.HOST}
        return [index for index, site in enumerate(sites) if site in free and index in self._sendable]

    def _streaming(self, placement: StatePlacement) -> Iterator[int]:
        """So many eighths of the blocks' hosted buckets, spread evenly over them."""
        if placement.eighths:
            hosted, eighths = self._on_host(placement.hosted), placement.eighths
            for number, index in enumerate((index for index in self._streamable if index in hosted), start=1):
                if number * eighths // PARTS > (number - 1) * eighths // PARTS:
                    yield index
