"""The least memory: the fewest bytes of the device that training takes within so much host memory, and the reverse.

A refusal has to be true: that nothing fits, and how much would be enough. The search by time has a sample. Here are all
state placements, each with all ways to choose the weights that are offloaded.

Device bytes of a placement with its weights on the device only at the ticks that use them, T being those offloaded:

    rest + (all weights - those of T) + the most that is used of T at one tick (+ codes, if any of T is encoded)

What T frees never shrinks as T grows, so without a limit on the host T is all that may be offloaded; with one, T is
filled from the largest on, weights whose copy costs nothing first. For blocks that are alike this is the best T.

Putting a bucket's state on the host and sending its gradients there never takes more of the device: its gradient was on
the device all the time and is now in a slot, which costs at most as much (``addresses.py``). So the last placement
takes the least of the device, and where the host has room for it, nothing else is looked at.

Numbers found here are those of a layout that has been placed: a budget of exactly so much is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Layout
from deepstow.strategies.planner import weight_schedule
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.places import Movable, Placement, Places
from deepstow.strategies.planner.spill import spilled

SAMPLE = 64  # placements up to which all are looked at
COARSE, AROUND, CLOSER = 16, 3, 4  # of more: the first ones, the best around which it goes on, how much closer then
OTHER = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE}


@dataclass(frozen=True, slots=True)
class Least:
    """A layout that needs the least of one tier, what it was made from, and the bytes of both arenas."""

    num_bytes: dict[Tier, int]
    layout: Layout
    places: Places
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Point:
    """A placement with the weights that are offloaded; the bytes that it should take, before it is placed."""

    places: Places
    placement: Placement
    offloaded: tuple[int, ...]
    num_bytes: dict[Tier, int]

    def placed(self) -> Least:
        layout = weight_schedule.only_while_used(self.places.layout(self.placement), self.offloaded)
        return Least(dict(place(layout).arena_bytes), layout, self.places, self.placement)


def least_memory(families: Iterable[Places], tier: Tier, room: float = inf, *, all_leave: bool = False) -> Least | None:
    """The layout of these placements that needs the least of ``tier``; None: nothing is within ``room``.

    Args:
        families: differ in their buckets or sites.
        room: bytes of the other tier.
        all_leave: every weight that may be offloaded is.
    """
    other_tier, best = OTHER[tier], None

    def order(point: _Point) -> tuple[int, int]:
        return (point.num_bytes[tier], point.num_bytes[other_tier])

    points = [p for family in families for p in _points(family, tier, room, order, all_leave=all_leave)]
    for point in sorted(points, key=order):
        if best is not None and point.num_bytes[tier] >= best.num_bytes[tier]:
            break
        placed = point.placed()  # packing may need more than a point should take
        if placed.num_bytes[other_tier] <= room and (best is None or placed.num_bytes[tier] < best.num_bytes[tier]):
            best = placed
    return best


def _points(
    family: Places, tier: Tier, room: float, order: Callable[[_Point], tuple[int, int]], *, all_leave: bool
) -> Iterator[_Point]:
    """The points within ``room`` of all placements, and of the same with all host updates of blocks streamed, which may
    need less of the host.
    """
    on_host = room if tier is Tier.DEVICE else 0.0  # of the host what there is, or as little as can be
    ladder = family.ladder()
    if tier is Tier.DEVICE:
        placement = spilled(family, ladder[-1], on_host)
        last = _point(family, placement, family.movable(placement))
        if last.num_bytes[Tier.HOST] <= room:
            yield last
            return

    def make(placement: Placement) -> _Point | None:
        sizes, weights = family.sizes(placement), family.movable(placement)
        offloaded: Sequence[Movable] | None = weights
        if not all_leave and tier is Tier.DEVICE:
            offloaded = most_freed(weights, room - sizes.host)
        elif not all_leave:
            offloaded = fewest_copies(weights, sizes.weights - sizes.room(int(room)))
        point = None if offloaded is None else _point(family, placement, offloaded)
        return point if point is not None and point.num_bytes[OTHER[tier]] <= room else None

    placement_at = cache(lambda index: spilled(family, ladder[index], on_host))
    yield from _best_of(len(ladder), lambda index: make(placement_at(index)), order)
    yield from _best_of(len(ladder), lambda index: make(family.streamed(placement_at(index))), order)


def _point(family: Places, placement: Placement, offloaded: Sequence[Movable]) -> _Point:
    """The point at which the weights ``offloaded`` are."""
    sizes = family.sizes(placement)
    device = sizes.weights + sizes.rest + bool(offloaded) * sizes.codes - freed(offloaded)
    host = sizes.host + sum(weight.copy_bytes for weight in offloaded)
    indices = tuple(weight.index for weight in offloaded)
    return _Point(family, placement, indices, {Tier.DEVICE: device, Tier.HOST: host})


def _best_of(
    count: int, make: Callable[[int], _Point | None], order: Callable[[_Point], tuple[int, int]]
) -> list[_Point]:
    """The points of all ``count`` placements. Of many a sample is made, and then those around the best ones, closer and
    closer; a minimum that is missed this way is one of a few buckets, of hundreds.
    """
    step = 1 if count <= SAMPLE else count // COARSE
    points: dict[int, _Point | None] = {}
    indices = {*range(0, count, step), count - 1}
    while True:
        points |= {index: make(index) for index in indices if index not in points}
        fitting = {index: point for index, point in points.items() if point is not None}
        if step == 1 or not fitting:
            return list(fitting.values())
        best = sorted(fitting, key=lambda index: order(fitting[index]))[:AROUND]
        finer = max(1, step // CLOSER)
        around = (at for index in best for at in range(index - step, index + step + 1, finer))
        indices, step = {at for at in around if 0 <= at < count}, finer


def most_freed(weights: Sequence[Movable], copy_bytes: float) -> list[Movable]:
    """Weights whose copies take at most ``copy_bytes`` and that free the most of the device."""
    chosen, spare = [], copy_bytes
    for weight in _in_order(weights):
        if weight.copy_bytes <= spare:
            chosen.append(weight)
            spare -= weight.copy_bytes
    return chosen


def freed(weights: Collection[Movable]) -> int:
    """Bytes of the device that are free at every tick if these weights are there only while they are used."""
    live = defaultdict[int, int](int)
    for weight in weights:
        num_bytes = weight.num_bytes
        for tick in weight.ticks:
            live[tick] += num_bytes
    return sum(weight.num_bytes for weight in weights) - max(live.values(), default=0)


def _in_order(weights: Sequence[Movable]) -> list[Movable]:
    """Those whose copies cost nothing, then the largest, the last of equals first."""
    return sorted(weights, key=lambda weight: (weight.copy_bytes > 0, -weight.num_bytes, -weight.index))


def fewest_copies(weights: Sequence[Movable], freed_bytes: int) -> list[Movable] | None:
    """The first weights that free at least ``freed_bytes`` of the device, without those that are not needed for it;
    None: all do not.
    """
    live = defaultdict[int, int](int)
    total = 0
    peak = 0
    chosen = list[Movable]()
    if freed_bytes <= 0:
        return []
    for weight in _in_order(weights):
        chosen.append(weight)
        total += weight.num_bytes
        for tick in weight.ticks:
            live[tick] += weight.num_bytes
            peak = max(peak, live[tick])
        if total - peak >= freed_bytes:
            spare, needed = total - peak - freed_bytes, list[Movable]()
            for candidate in sorted(chosen, key=lambda w: -w.copy_bytes):
                if candidate.copy_bytes and candidate.num_bytes <= spare:
                    spare -= candidate.num_bytes
                else:
                    needed.append(candidate)
            return needed
    return None
