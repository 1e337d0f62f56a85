"""Addresses: one spot in an arena for every need of a layout.

What is permanent comes first, in order of use; then the rings. A ring has slots of its largest member's size, and its
k-th member gets slot k modulo their number. For a window that slides over buckets in order, forward and backward,
that is the fewest bytes there can be: neighbours never share a slot, and no third place would help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from strategies.core.facts import Home
from strategies.core.layout import Addresses, Item, Layout, Need, Spot, aligned, needs, scratch_bytes


@dataclass(frozen=True, slots=True)
class Ring:
    """Slots of equal size that ``members`` pass through in turn."""

    item: Item
    home: Home
    num_slots: int
    slot_bytes: int
    members: tuple[Need, ...]

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def place(layout: Layout) -> Addresses:
    """The addresses of ``layout``; the same for the same layout."""
    every = all_needs(layout)
    ends = dict.fromkeys(Home, 0)
    spots: dict[tuple[str, Item], Spot] = {}

    def take(home: Home, num_bytes: int) -> int:
        start = ends[home]
        ends[home] = start + aligned(num_bytes)
        return start

    for need in every:
        if need.ring is None:
            spots[need.bucket, need.item] = Spot(need.home, take(need.home, need.num_bytes), need.num_bytes)
    for ring in rings(every, layout):
        start = take(ring.home, ring.num_bytes)
        for index, need in enumerate(ring.members):
            offset = start + index % ring.num_slots * ring.slot_bytes
            spots[need.bucket, need.item] = Spot(ring.home, offset, need.num_bytes)
    if scratch := scratch_bytes(layout):
        spots["", Item.SCRATCH] = Spot(Home.DEVICE, take(Home.DEVICE, scratch), scratch)
    return Addresses(ends[Home.DEVICE], ends[Home.HOST], spots)


def all_needs(layout: Layout) -> list[Need]:
    """The needs of all buckets, in order."""
    return [need for bucket in layout.buckets for need in needs(bucket, layout)]


def rings(every: Iterable[Need], layout: Layout) -> Iterator[Ring]:
    """The rings that ``every`` need of a layout passes through."""
    members: dict[tuple[Item, str], list[Need]] = {}
    for need in every:
        if need.ring is not None:
            members.setdefault((need.item, need.ring), []).append(need)
    for (item, name), passing in members.items():
        num_slots = min(layout.slots(name), len(passing))
        size = max(aligned(need.num_bytes) for need in passing)
        yield Ring(item, passing[0].home, num_slots, size, tuple(passing))


def arena_bytes(every: Iterable[Need], layout: Layout, scratch: int) -> dict[Home, int]:
    """The sizes of the arenas that ``place`` makes, without placing."""
    total = {Home.DEVICE: scratch, Home.HOST: 0}
    passing: list[Need] = []
    for need in every:
        if need.ring is None:
            total[need.home] += aligned(need.num_bytes)
        else:
            passing.append(need)
    for ring in rings(passing, layout):
        total[ring.home] += ring.num_bytes
    return total
