"""Addresses: one spot in an arena for every need of a layout.

What is permanent comes first, in order of use; before it, on the host, what other ranks read. Travelling weights
follow, packed by their resident ticks: two may share bytes if they are never on the device at the same tick.
Gradients, arrivals and visiting states pass in order through pools of slots, the k-th member of a pool through slot k
modulo their number. Last comes what belongs to no bucket: scratch, and saved tensors that wait on the host.

A pool has slots of its largest member's size. A head of 250 MiB would make each slot so large for blocks of 86 MiB; so
members are grouped by size (``size_classes``), each class with as many slots as the layout has for the item, or as it
has members. No bucket waits longer for its slot than in one pool for all. The bytes are the least of all groupings:
exchanging members of two classes until all of one are at least as large as all of the other can only shrink one, so it
is enough to cut the sorted sizes, which is a shortest path. One member more never costs more than its own size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import inf

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import (
    Addresses,
    Bucket,
    Item,
    Layout,
    Need,
    Spot,
    aligned,
    common_needs,
    needs,
    read_by_all,
)


@dataclass(frozen=True, slots=True)
class SlotPool:
    """Slots of equal size that ``members`` use round-robin."""

    item: Item
    tier: Tier
    num_slots: int
    slot_bytes: int
    members: tuple[Need, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes


def place(layout: Layout, hosted_bytes: int = 0) -> Addresses:
    """The addresses of ``layout`` and of ``hosted_bytes`` of saved tensors on the host. The same for the same input."""
    ends = dict.fromkeys(Tier, 0)
    spots: dict[tuple[str, Item], Spot] = {}

    def take(tier: Tier, num_bytes: int) -> int:
        start = ends[tier]
        ends[tier] = start + aligned(num_bytes, tier)
        return start

    read = {bucket.name: read_by_all(bucket, layout) for bucket in layout.buckets}
    bucket_needs = all_needs(layout)
    for need in sorted(bucket_needs, key=lambda need: need.item is not read[need.bucket]):
        if not need.passes:
            spots[need.bucket, need.item] = Spot(need.tier, take(need.tier, need.num_bytes), need.num_bytes)
    moving = travelling(layout)
    packing = weight_packing(layout)
    start = take(Tier.DEVICE, packing.arena)
    for bucket, offset in zip(moving, packing.offsets, strict=True):
        spots[bucket.name, Item.WEIGHT] = Spot(Tier.DEVICE, start + offset, bucket.weight_bytes)
    for pool in _pools(layout, bucket_needs):
        start = take(pool.tier, pool.num_bytes)
        for index, need in enumerate(pool.members):
            offset = start + index % pool.num_slots * pool.slot_bytes
            spots[need.bucket, need.item] = Spot(pool.tier, offset, need.num_bytes)
    for need in common_needs(layout, hosted_bytes):
        spots[need.bucket, need.item] = Spot(need.tier, take(need.tier, need.num_bytes), need.num_bytes)
    return Addresses(ends, spots)


def all_needs(layout: Layout) -> list[Need]:
    """The needs of all buckets, in order."""
    return [need for bucket in layout.buckets for need in needs(bucket, layout)]


def held_bytes(bucket_needs: Iterable[Need], tier: Tier) -> int:
    """What these needs are of one tier, outside of slots."""
    return sum(aligned(need.num_bytes, tier) for need in bucket_needs if need.tier is tier and not need.passes)


def travelling(layout: Layout) -> list[Bucket]:
    """Buckets whose weights are not always on the device, in order."""
    return [bucket for bucket in layout.buckets if not bucket.resident]


def weight_packing(layout: Layout) -> Packing:
    """The offsets of travelling weights in the region that they share; those that move together are adjacent."""
    moving = travelling(layout)
    together: dict[tuple[object, ...], list[int]] = {}
    for index, bucket in enumerate(moving):
        together.setdefault((bucket.units, bucket.resident_ticks), []).append(index)
    sizes = [aligned(bucket.weight_bytes) for bucket in moving]
    groups = list(together.values())
    packing = pack(tuple([Piece(sum(sizes[i] for i in group), moving[group[0]].resident_ticks) for group in groups]))
    offsets = [0] * len(moving)
    for start, group in zip(packing.offsets, groups, strict=True):
        for index, offset in zip(group, accumulate((sizes[i] for i in group), initial=start), strict=False):
            offsets[index] = offset
    return replace(packing, offsets=tuple(offsets))


def slot_pools(layout: Layout) -> Iterator[SlotPool]:
    """The slots for gradients, arrivals and visiting states: one pool for each class of sizes, the largest first."""
    return _pools(layout, all_needs(layout))


def _pools(layout: Layout, needs: Iterable[Need]) -> Iterator[SlotPool]:
    members: dict[Item, list[Need]] = {}
    for need in needs:
        if need.passes and need.item is not Item.WEIGHT:
            members.setdefault(need.item, []).append(need)
    for item, passing in members.items():
        tier, unpooled = passing[0].tier, passing
        classes = size_classes((aligned(need.num_bytes, tier) for need in passing), layout.slots(item))
        for (size, num_slots), (below, _) in zip(classes, (*classes[1:], (-1, 0)), strict=True):
            of_class = tuple(need for need in unpooled if aligned(need.num_bytes, tier) > below)
            unpooled = [need for need in unpooled if aligned(need.num_bytes, tier) <= below]
            yield SlotPool(item, tier, num_slots, size, of_class)


def size_classes(sizes: Iterable[int], most_slots: int) -> tuple[tuple[int, int], ...]:
    """Classes of ``sizes`` that need the fewest bytes: the size of a slot, descending, and the number of slots.

    A class holds the sizes from its own down to, and without, the next one's; equal sizes are in one class.

    Args:
        most_slots: of a class; it has no more than members.
    """
    return _classes(tuple(sorted(Counter(sizes).items(), reverse=True)), most_slots)


@lru_cache(maxsize=4096)
def _classes(counts: tuple[tuple[int, int], ...], most_slots: int) -> tuple[tuple[int, int], ...]:
    """``size_classes`` of sizes, descending, and how often each occurs; the fewest classes of equally many bytes."""
    # From the last size to the first: the bytes from there on, the number of classes, and where the second one begins.
    best = [(0, 0, len(counts))]
    for start in reversed(range(len(counts))):
        size = counts[start][0]
        members = 0
        choices = []
        for following, (rest_bytes, classes, _) in enumerate(reversed(best), start=start + 1):
            members += counts[following - 1][1]
            choices.append((min(most_slots, members) * size + rest_bytes, 1 + classes, following))
        best.append(min(choices))
    best.reverse()
    slot_classes, start = [], 0
    while start < len(counts):
        following = best[start][2]
        members = sum(number for _, number in counts[start:following])
        slot_classes.append((counts[start][0], min(most_slots, members)))
        start = following
    return tuple(slot_classes)


def slot_numbers(layout: Layout) -> dict[tuple[str, Item], int]:
    """The slot of each need that uses one, by bucket and item; numbers are unique over all pools."""
    numbers, first_slot = {}, 0
    for pool in slot_pools(layout):
        for index, need in enumerate(pool.members):
            numbers[need.bucket, need.item] = first_slot + index % pool.num_slots
        first_slot += pool.num_slots
    on_disk = [bucket.name for bucket in layout.buckets if bucket.state_on_disk]
    # Pieces of a bucket pass the window one by one; here as if it had slots for whole ones: it is as busy then.
    numbers |= {(name, Item.WINDOW): first_slot + index % layout.window_slots for index, name in enumerate(on_disk)}
    return numbers


# --- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are alive in half-open ranges of ticks, ascending, at least one."""

    num_bytes: int
    spans: tuple[tuple[int, int], ...]

    @property
    def duration(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class Packing:
    """An offset for each piece, the arena, and the lower bound on any arena."""

    offsets: tuple[int, ...]
    arena: int
    bound: int


def max_live(pieces: Sequence[Piece]) -> int:
    """Bytes alive at the worst tick."""
    changes: dict[int, int] = {}
    for piece in pieces:
        for start, end in piece.spans:
            changes[start] = changes.get(start, 0) + piece.num_bytes
            changes[end] = changes.get(end, 0) - piece.num_bytes
    worst = alive = 0
    for tick in sorted(changes):
        alive += changes[tick]
        worst = max(worst, alive)
    return worst


@lru_cache(maxsize=64)  # a search packs the same weights again and again
def pack(pieces: tuple[Piece, ...]) -> Packing:
    """The smallest arena that is found; the result does not depend on the order of the pieces."""
    by_span = sorted(range(len(pieces)), key=lambda index: (pieces[index].spans, pieces[index].num_bytes))
    bound, overlapping = max_live(pieces), _overlapping(pieces)
    packings: list[Packing] = []
    for key in _ORDERS:
        ranks = [key(piece) for piece in pieces]
        order = sorted(by_span, key=ranks.__getitem__)  # stable: equal ranks keep their order
        for best_fit in (False, True):
            offsets = _placed(pieces, overlapping, order, best_fit=best_fit)
            packings.append(Packing(tuple(offsets), _top(pieces, offsets), bound))
            if packings[-1].arena == bound:
                return packings[-1]
    return min(packings, key=lambda packing: packing.arena)


_ORDERS: tuple[Callable[[Piece], int], ...] = (
    lambda piece: -piece.num_bytes,
    lambda piece: -piece.num_bytes * piece.duration,
    lambda piece: -piece.duration,
    lambda piece: piece.spans[0][0],
)


def _top(pieces: Sequence[Piece], offsets: Sequence[int]) -> int:
    """The end of the highest piece."""
    return max((offset + piece.num_bytes for offset, piece in zip(offsets, pieces, strict=True)), default=0)


def _placed(
    pieces: Sequence[Piece], overlapping: Sequence[Sequence[int]], order: Iterable[int], *, best_fit: bool
) -> list[int]:
    """An offset for each piece, placed in ``order`` in the lowest hole between those that are alive with it.

    Args:
        overlapping: per piece, those that are alive at the same time.
        best_fit: in the smallest hole instead.
    """
    offsets = [-1] * len(pieces)
    for index in order:
        size, floor = pieces[index].num_bytes, 0
        occupied = [(offsets[other], pieces[other].num_bytes) for other in overlapping[index] if offsets[other] >= 0]
        holes: list[tuple[float, int]] = []  # size and offset of those that are large enough
        for start, num_bytes in sorted(occupied):
            if start - floor >= size:
                holes.append((start - floor, floor))
            floor = max(floor, start + num_bytes)
        holes.append((inf, floor))
        offsets[index] = (min(holes) if best_fit else holes[0])[1]
    return offsets


def _overlapping(pieces: Sequence[Piece]) -> list[list[int]]:
    """Per piece, the others that are alive at the same time."""
    masks = [sum((1 << end) - (1 << start) for start, end in piece.spans) for piece in pieces]  # the ticks as bits
    return [
        [other for other, theirs in enumerate(masks) if mask & theirs and other != index]
        for index, mask in enumerate(masks)
    ]
