"""Packing: one address for each piece of memory that is alive some of the time, in the smallest arena that is found.

A piece has a size and the half-open ranges of ticks at which it is alive: a bucket that leaves and comes back has two,
and one address for both. Pieces that are alive together do not overlap. The bytes alive at the worst tick are a lower
bound, which cannot always be met: of a known instance of eight pieces it is 4, and 5 are needed
(``tests/unit/test_addresses.py``).

The problem is NP-hard: a portfolio of orders {size, area, duration, start} x {first fit, best fit} is tried until the
lower bound is met. For 200 random pieces it is 4 to 5 % above the bound. Pieces of one size with one range each meet
the bound at once: the first order is then by start, and first fit takes the lowest free slot (left edge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf


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
    by_span = sorted(range(len(pieces)), key=lambda index: (pieces[index].spans, pieces[index].num_bytes))
    bound, overlapping = max_live(pieces), _overlapping(pieces)
    found: list[Packing] = []
    for key in _ORDERS:
        ranks = [key(piece) for piece in pieces]
        order = sorted(by_span, key=ranks.__getitem__)  # stable: equal ranks keep their order
        for best_fit in (False, True):
            offsets = _place(pieces, overlapping, order, best_fit=best_fit)
            found.append(Packing(tuple(offsets), _top(pieces, offsets), bound))
            if found[-1].arena == bound:
                return found[-1]
    return min(found, key=lambda packing: packing.arena)


_ORDERS: tuple[Callable[[Piece], int], ...] = (
    lambda piece: -piece.num_bytes,
    lambda piece: -piece.num_bytes * piece.duration,
    lambda piece: -piece.duration,
    lambda piece: piece.spans[0][0],
)


def _top(pieces: Sequence[Piece], offsets: Sequence[int]) -> int:
    """The end of the highest piece."""
    return max((offset + piece.num_bytes for offset, piece in zip(offsets, pieces, strict=True)), default=0)


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
