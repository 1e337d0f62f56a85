"""Addresses: one spot in an arena for every need of a layout.

What is permanent comes first, in order of use. Travelling weights follow, packed by their resident ticks
(``packing.py``): two may share bytes if they are never on the device at the same tick. Gradients, arrivals and visiting
states use pools of slots of the largest one's size, the k-th of them slot k modulo their number; they pass in order, so
fewer bytes would not be enough. Last comes what belongs to no bucket: scratch, and saved tensors that wait on the host.

Invariant. A layout is packed once: the search, the addresses and the tables share the result of ``weight_packing``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from strategies.core.facts import Home
from strategies.core.layout import (
    Addresses,
    Bucket,
    Item,
    Layout,
    Need,
    Range,
    Spot,
    aligned,
    common_needs,
    needs,
)
from strategies.planner.packing import Packing, Piece, pack


@dataclass(frozen=True, slots=True)
class SlotPool:
    """Slots of equal size that ``members`` use round-robin."""

    item: Item
    home: Home
    num_slots: int
    slot_bytes: int
    members: tuple[Need, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes


def place(layout: Layout, hosted_bytes: int = 0) -> Addresses:
    """The addresses of ``layout`` and of ``hosted_bytes`` of saved tensors on the host. The same for the same input."""
    ends = dict.fromkeys(Home, 0)
    spots: dict[tuple[str, Item], Spot] = {}

    def take(home: Home, num_bytes: int) -> int:
        start = ends[home]
        ends[home] = start + aligned(num_bytes, home)
        return start

    for need in all_needs(layout):
        if not need.passes:
            spots[need.bucket, need.item] = Spot(need.home, take(need.home, need.num_bytes), need.num_bytes)
    moving = travelling(layout)
    packing = weight_packing(layout)
    start = take(Home.DEVICE, packing.arena)
    for bucket, offset in zip(moving, packing.offsets, strict=True):
        spots[bucket.name, Item.WEIGHT] = Spot(Home.DEVICE, start + offset, bucket.weight_bytes)
    for pool in slot_pools(layout):
        start = take(pool.home, pool.num_bytes)
        for index, need in enumerate(pool.members):
            offset = start + index % pool.num_slots * pool.slot_bytes
            spots[need.bucket, need.item] = Spot(pool.home, offset, need.num_bytes)
    for need in common_needs(layout, hosted_bytes):
        spots[need.bucket, need.item] = Spot(need.home, take(need.home, need.num_bytes), need.num_bytes)
    return Addresses(ends, spots)


def all_needs(layout: Layout) -> list[Need]:
    """The needs of all buckets, in order."""
    return [need for bucket in layout.buckets for need in needs(bucket, layout)]


def travelling(layout: Layout) -> list[Bucket]:
    """Buckets whose weights are not always on the device, in order."""
    return [bucket for bucket in layout.buckets if not bucket.resident]


def weight_packing(layout: Layout) -> Packing:
    """The offsets of travelling weights in the region that they share; those that move together are adjacent."""
    return _packed(tuple((b.units, b.resident_ticks, aligned(b.weight_bytes)) for b in travelling(layout)))


@lru_cache(maxsize=64)
def _packed(weights: tuple[tuple[tuple[str, ...], tuple[Range, ...], int], ...]) -> Packing:
    together: dict[tuple[object, ...], list[int]] = {}
    for index, (units, ranges, _) in enumerate(weights):
        together.setdefault((units, ranges), []).append(index)
    packing = pack([Piece(sum(weights[i][2] for i in group), weights[group[0]][1]) for group in together.values()])
    offsets = [0] * len(weights)
    for start, group in zip(packing.offsets, together.values(), strict=True):
        for index, offset in zip(group, accumulate((weights[i][2] for i in group), initial=start), strict=False):
            offsets[index] = offset
    return replace(packing, offsets=tuple(offsets))


def slot_pools(layout: Layout) -> Iterator[SlotPool]:
    """The slots for gradients, arrivals and visiting states."""
    members: dict[Item, list[Need]] = {}
    for need in all_needs(layout):
        if need.passes and need.item is not Item.WEIGHT:
            members.setdefault(need.item, []).append(need)
    for item, passing in members.items():
        num_slots = min(layout.slots(item), len(passing))
        home = passing[0].home
        size = max(aligned(need.num_bytes, home) for need in passing)
        yield SlotPool(item, home, num_slots, size, tuple(passing))


def slot_numbers(layout: Layout) -> dict[tuple[str, Item], int]:
    """The slot of each need that uses one, by bucket and item; numbers are unique over all pools."""
    found, first = {}, 0
    for pool in slot_pools(layout):
        for index, need in enumerate(pool.members):
            found[need.bucket, need.item] = first + index % pool.num_slots
        first += pool.num_slots
    return found
