"""Addresses: one spot in an arena for every need of a layout.

What is permanent comes first, in order of use. Weights that travel follow, packed by their ``resident_ticks``
(``packing.py``): two may share bytes if they are never on the device at the same tick. Gradients, arrivals and visiting
states use slots of the largest one's size in turn, the k-th slot k modulo their number; they come in order, so fewer
bytes would not be enough. Last comes what belongs to no bucket: scratch, and saved tensors that wait on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from strategies.core.facts import Home
from strategies.core.layout import (
    Addresses,
    Bucket,
    Item,
    Layout,
    Need,
    Spot,
    aligned,
    common_needs,
    needs,
    scratch_bytes,
)
from strategies.planner.packing import Packing, Piece, pack


@dataclass(frozen=True, slots=True)
class Turns:
    """Slots of equal size that ``members`` use in turn."""

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
    packing = packed(moving)
    start = take(Home.DEVICE, packing.arena)
    for bucket, offset in zip(moving, packing.offsets, strict=True):
        spots[bucket.name, Item.WEIGHT] = Spot(Home.DEVICE, start + offset, bucket.weight_bytes)
    for turns in in_turns(layout):
        start = take(turns.home, turns.num_bytes)
        for index, need in enumerate(turns.members):
            offset = start + index % turns.num_slots * turns.slot_bytes
            spots[need.bucket, need.item] = Spot(turns.home, offset, need.num_bytes)
    for need in common_needs(layout, hosted_bytes):
        spots[need.bucket, need.item] = Spot(need.home, take(need.home, need.num_bytes), need.num_bytes)
    return Addresses(ends, spots)


def all_needs(layout: Layout) -> list[Need]:
    """The needs of all buckets, in order."""
    return [need for bucket in layout.buckets for need in needs(bucket, layout)]


def travelling(layout: Layout) -> list[Bucket]:
    """Buckets whose weights travel, in order."""
    return [bucket for bucket in layout.buckets if not bucket.resident]


def packed(buckets: Sequence[Bucket]) -> Packing:
    """Offsets of travelling weights in the memory that they share.

    Buckets with the same units and the same ticks are packed as one piece.
    """
    together: dict[tuple[object, ...], list[int]] = {}
    for index, bucket in enumerate(buckets):
        together.setdefault((bucket.units, bucket.resident_ticks), []).append(index)
    sizes = [aligned(bucket.weight_bytes) for bucket in buckets]
    pieces = [Piece(sum(sizes[i] for i in some), buckets[some[0]].resident_ticks) for some in together.values()]
    packing = pack(pieces)
    offsets = [0] * len(buckets)
    for start, some in zip(packing.offsets, together.values(), strict=True):
        for index, offset in zip(some, accumulate((sizes[i] for i in some), initial=start), strict=False):
            offsets[index] = offset
    return replace(packing, offsets=tuple(offsets))


def in_turns(layout: Layout) -> Iterator[Turns]:
    """What uses slots in turn, other than weights."""
    members: dict[Item, list[Need]] = {}
    for need in all_needs(layout):
        if need.passes and need.item is not Item.WEIGHT:
            members.setdefault(need.item, []).append(need)
    for item, passing in members.items():
        num_slots = min(layout.slots(item), len(passing))
        home = passing[0].home
        size = max(aligned(need.num_bytes, home) for need in passing)
        yield Turns(item, home, num_slots, size, tuple(passing))


def arena_bytes(layout: Layout) -> dict[Home, int]:
    """The sizes of the arenas that ``place`` makes, without travelling weights and saved tensors."""
    total = {Home.DEVICE: scratch_bytes(layout), Home.HOST: 0}
    for need in all_needs(layout):
        if not need.passes:
            total[need.home] += aligned(need.num_bytes, need.home)
    for turns in in_turns(layout):
        total[turns.home] += turns.num_bytes
    return total
