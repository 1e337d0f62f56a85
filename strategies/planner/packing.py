"""Packing: one address for each piece of memory that is alive some of the time, in the smallest arena that is found.

A piece has a size and the half-open ranges of ticks at which it is alive: a bucket that leaves and comes back has two,
and one address for both. A piece that is alive over the end of an iteration has a range at each end. The only
constraint is that pieces that are alive together do not overlap. The bytes alive at the worst tick are a lower bound.

The problem is NP-hard: a portfolio of orders {size, area, duration, start} x {first fit, best fit}, then ``REPAIRS``
rounds of a skyline: of the pieces that fit on the lowest segment of what is placed, take the one that is alive longest;
if none fits, the segment is raised to its lower neighbour. What reaches above the lower bound counts as longer by
``BOOST`` in the next round. The search ends as soon as the lower bound is met. For 200 random pieces the portfolio
alone is 4 to 5 % above the bound, with repairs half a percent. Pieces of one size with one range each meet the bound at
once: the first order is then by start, and first fit takes the lowest free slot (left edge). This is why buckets have
uniform sizes.

The bound cannot always be met: a known instance of eight pieces has max-live 4 and needs 5
(``tests/unit/test_planner_packing.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

REPAIRS = 50
BOOST = 2.0


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


def pack(pieces: Sequence[Piece]) -> Packing:
    """The smallest arena that is found; the result does not depend on the order of the pieces."""
    order = sorted(range(len(pieces)), key=lambda index: (pieces[index].spans, pieces[index].num_bytes))
    sorted_pieces = [pieces[index] for index in order]
    packing = _pack(sorted_pieces)
    offsets = [0] * len(pieces)
    for index, offset in zip(order, packing.offsets, strict=True):
        offsets[index] = offset
    return Packing(tuple(offsets), packing.arena, packing.bound)


def _pack(pieces: Sequence[Piece]) -> Packing:
    bound = max_live(pieces)
    overlapping = _overlapping(pieces)
    best: Packing | None = None
    for key in _ORDERS:
        ranks = [key(piece) for piece in pieces]
        order = sorted(range(len(pieces)), key=ranks.__getitem__)  # stable: equal ranks keep their order
        for best_fit in (False, True):
            offsets = _place(pieces, overlapping, order, best_fit=best_fit)
            arena = _top(pieces, offsets)
            if best is None or arena < best.arena:
                best = Packing(tuple(offsets), arena, bound)
            if arena == bound:
                return best
    assert best is not None
    return _repair(pieces, best)


_ORDERS: tuple[Callable[[Piece], int], ...] = (
    lambda piece: -piece.num_bytes,
    lambda piece: -piece.num_bytes * piece.duration,
    lambda piece: -piece.duration,
    lambda piece: piece.spans[0][0],
)


def _repair(pieces: Sequence[Piece], best: Packing) -> Packing:
    """Rounds of the skyline; pieces that reached too high in one round are placed earlier in the next."""
    skyline = _Skyline(pieces)
    weights = [float(piece.duration) for piece in pieces]
    for _ in range(REPAIRS):
        offsets = skyline.place(weights)
        arena = _top(pieces, offsets)
        if arena < best.arena:
            best = Packing(tuple(offsets), arena, best.bound)
        if best.arena == best.bound:
            break
        for index, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
            if offset + piece.num_bytes > best.bound:
                weights[index] *= BOOST
    return best


def _top(pieces: Sequence[Piece], offsets: Sequence[int]) -> int:
    """The end of the highest piece."""
    return max((offset + piece.num_bytes for offset, piece in zip(offsets, pieces, strict=True)), default=0)


class _Skyline:
    """Places pieces on the lowest segment of what is placed already."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        edges = sorted({tick for piece in pieces for span in piece.spans for tick in span})
        place = {tick: index for index, tick in enumerate(edges)}
        self._pieces, self._width = pieces, max(len(edges) - 1, 0)
        self._spans = [[(place[start], place[end]) for start, end in piece.spans] for piece in pieces]

    def place(self, weights: Sequence[float]) -> list[int]:
        """An offset for each piece; of those that fit on a segment, the heaviest, then the largest, comes first."""
        heights, offsets = [0] * self._width, [0] * len(self._pieces)
        left = sorted(range(len(weights)), key=lambda i: (-weights[i], -self._pieces[i].num_bytes, i))
        while left:
            lowest = min(heights)
            start = heights.index(lowest)
            end = next((at for at in range(start, self._width) if heights[at] != lowest), self._width)
            fitting = (i for i in left if start <= self._spans[i][0][0] and self._spans[i][0][1] <= end)
            taken = next((index for index in fitting if self._lies(index, heights)), None)
            if taken is None:
                beside = heights[start - 1 : start] + heights[end : end + 1]
                heights[start:end] = [min(beside)] * (end - start)
                continue
            left.remove(taken)
            offsets[taken] = lowest
            for low, high in self._spans[taken]:
                heights[low:high] = [lowest + self._pieces[taken].num_bytes] * (high - low)
        return offsets

    def _lies(self, index: int, heights: Sequence[int]) -> bool:
        """Whether the piece's further ranges, if any, are free at the height of its first."""
        spans = self._spans[index]
        return len(spans) == 1 or all(max(heights[low:high]) == heights[spans[0][0]] for low, high in spans)


def _place(
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
        taken = [(offsets[other], pieces[other].num_bytes) for other in overlapping[index] if offsets[other] >= 0]
        holes: list[tuple[float, int]] = []  # size and offset of those that are large enough
        for start, num_bytes in sorted(taken):
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
