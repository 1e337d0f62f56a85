"""The least memory: the fewest bytes of the device that training takes within so much host memory, and the reverse.

A refusal has to be true: that nothing fits, and how much would be enough. The search by time has a sample. Here are all
state placements, each with all ways to choose the weights that are offloaded.

Device bytes of a placement with its weights on the device only at the ticks that use them, T being those offloaded:

    rest + (all weights - those of T) + the most that is used of T at one tick (+ codes, if T has any in fp8)

so offloading T frees its bytes less that maximum. On the host it adds T's copies. What is freed never shrinks as T
grows, so without a limit on the host T is all that may be offloaded; with one, T is filled in order of size, from the
largest and from the smallest, weights whose copy costs nothing first. For blocks that are alike this is the best T.

Putting a bucket's state on the host and sending its gradients there never takes more of the device: its gradient was on
the device all the time and is now in a slot, which costs at most as much (``addresses.py``). So the last placement
takes the least of the device, and where the host has room for it, nothing else is looked at.

Numbers found here are those of a layout that has been placed: a budget of exactly so much is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import TypeAlias

from strategies.core.facts import Home
from strategies.core.layout import Layout
from strategies.planner import weight_schedule
from strategies.planner.addresses import place
from strategies.planner.placement_bytes import Movable
from strategies.planner.places import Placement, Places

SAMPLE = 64  # placements up to which all are looked at
COARSE, AROUND, CLOSER = 16, 3, 4  # of more: the first ones, the best around which it goes on, how much closer then
OTHER = {Home.DEVICE: Home.HOST, Home.HOST: Home.DEVICE}


@dataclass(frozen=True, slots=True)
class Least:
    """A layout that needs the least of one home, what it was made from, and the bytes of both arenas."""

    num_bytes: dict[Home, int]
    layout: Layout
    places: Places
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Point:
    """A placement with the weights that are offloaded; the bytes that it should take, before it is placed."""

    places: Places
    placement: Placement
    offloaded: tuple[int, ...]
    num_bytes: dict[Home, int]

    def placed(self) -> Least:
        layout = weight_schedule.only_while_used(self.places.layout(self.placement), self.offloaded)
        return Least(dict(place(layout).arena_bytes), layout, self.places, self.placement)


Make: TypeAlias = Callable[[Placement], _Point | None]
Key: TypeAlias = Callable[[_Point], tuple[int, int]]


def least_memory(families: Sequence[Places], home: Home, room: float = inf, *, all_leave: bool = False) -> Least | None:
    """The layout of these placements that needs the least of ``home``; None: nothing is within ``room``.

    Args:
        families: differ in their buckets or sites.
        room: bytes of the other home.
        all_leave: every weight that may be offloaded is.
    """
    other, best = OTHER[home], None

    def key(point: _Point) -> tuple[int, int]:
        return (point.num_bytes[home], point.num_bytes[other])

    points = [p for family in families for p in _points(family, home, room, key, all_leave=all_leave)]
    for point in sorted(points, key=key):
        if best is not None and point.num_bytes[home] >= best.num_bytes[home]:
            break
        made = point.placed()  # packing may need more than a point should take
        if made.num_bytes[other] <= room and (best is None or made.num_bytes[home] < best.num_bytes[home]):
            best = made
    return best


def _points(family: Places, home: Home, room: float, key: Key, *, all_leave: bool) -> Iterator[_Point]:
    """The points within ``room`` of all placements, and of the same with all host updates of blocks streamed, which may
    need less of the host.
    """
    on_host = room if home is Home.DEVICE else 0.0  # of the host what there is, or as little as can be
    ladder = family.ladder()
    if home is Home.DEVICE:
        placement = family.spilled(ladder[-1], on_host)
        last = _point(family, placement, family.movable(placement))
        if last.num_bytes[Home.HOST] <= room:
            yield last
            return

    def plainly(placement: Placement) -> _Point | None:
        return make(family.spilled(placement, on_host))

    def streamed(placement: Placement) -> _Point | None:
        return make(family.streamed(family.spilled(placement, on_host)))

    def make(placement: Placement) -> _Point | None:
        sizes, weights = family.sizes(placement), family.movable(placement)
        if all_leave:
            some: Sequence[Movable] | None = weights
        elif home is Home.DEVICE:
            some = most_freed(weights, room - sizes.host)
        else:
            some = fewest_copies(weights, sizes.weights - sizes.room(int(room)))
        point = None if some is None else _point(family, placement, some)
        return point if point is not None and point.num_bytes[OTHER[home]] <= room else None

    yield from _best_of(ladder, plainly, key)
    yield from _best_of(ladder, streamed, key)


def _point(family: Places, placement: Placement, some: Sequence[Movable]) -> _Point:
    """The point at which ``some`` weights are offloaded."""
    sizes = family.sizes(placement)
    device = sizes.weights + sizes.rest + bool(some) * sizes.codes - freed(some)
    host = sizes.host + sum(weight.copy_bytes for weight in some)
    indices = tuple(weight.index for weight in some)
    return _Point(family, placement, indices, {Home.DEVICE: device, Home.HOST: host})


def _best_of(placements: Sequence[Placement], make: Make, key: Key) -> list[_Point]:
    """The points of all ``placements``. Of many a sample is made, and then those around the best ones, closer and
    closer; a minimum that is missed this way is one of a few buckets, of hundreds.
    """
    step = 1 if len(placements) <= SAMPLE else len(placements) // COARSE
    found: dict[int, _Point | None] = {}
    wanted = {*range(0, len(placements), step), len(placements) - 1} if placements else set[int]()
    while True:
        found |= {index: make(placements[index]) for index in wanted if index not in found}
        fitting = {index: point for index, point in found.items() if point is not None}
        if step == 1 or not fitting:
            return list(fitting.values())
        best = sorted(fitting, key=lambda index: key(fitting[index]))[:AROUND]
        finer = max(1, step // CLOSER)
        wanted = {at for index in best for at in range(index - step, index + step + 1, finer)}
        wanted = {at for at in wanted if 0 <= at < len(placements)}
        step = finer


def fewest_copies(weights: Sequence[Movable], freed_bytes: int) -> list[Movable] | None:
    """Weights that free at least ``freed_bytes`` of the device with the fewest bytes of copies; None: all do not."""
    found = [some for order in _orders(weights) if (some := _until(order, freed_bytes)) is not None]
    return min(found, key=lambda some: sum(weight.copy_bytes for weight in some), default=None)


def most_freed(weights: Sequence[Movable], copy_bytes: float) -> list[Movable]:
    """Weights whose copies take at most ``copy_bytes`` and that free the most of the device."""
    found = []
    for order in _orders(weights):
        some, left = [], copy_bytes
        for weight in order:
            if weight.copy_bytes <= left:
                some.append(weight)
                left -= weight.copy_bytes
        found.append(some)
    return max(found, key=freed)


def freed(weights: Collection[Movable]) -> int:
    """Bytes of the device that are free at every tick if these weights are there only while they are used."""
    live = defaultdict[int, int](int)
    for weight in weights:
        num_bytes = weight.num_bytes
        for tick in weight.ticks:
            live[tick] += num_bytes
    return sum(weight.num_bytes for weight in weights) - max(live.values(), default=0)


def _orders(weights: Sequence[Movable]) -> list[list[Movable]]:
    """From the largest and from the smallest; those whose copies cost nothing come first."""
    in_order = sorted(weights, key=attrgetter("index"), reverse=True)
    by_size = (sorted(in_order, key=attrgetter("num_bytes"), reverse=largest) for largest in (True, False))
    return [[w for w in some if not w.copy_bytes] + [w for w in some if w.copy_bytes] for some in by_size]


def _until(order: Sequence[Movable], freed_bytes: int) -> list[Movable] | None:
    """The first of ``order`` that free so much, without those that are not needed for it."""
    live, total, most = defaultdict[int, int](int), 0, 0
    if freed_bytes <= 0:
        return []
    for number, weight in enumerate(order, start=1):
        total += weight.num_bytes
        for tick in weight.ticks:
            live[tick] += weight.num_bytes
            if live[tick] > most:
                most = live[tick]
        if total - most >= freed_bytes:
            spare, found = total - most - freed_bytes, list[Movable]()
            for other in sorted(order[:number], key=lambda w: -w.copy_bytes):
                if other.copy_bytes and other.num_bytes <= spare:
                    spare -= other.num_bytes
                else:
                    found.append(other)
            return found
    return None
