"""What of a bucket's parameters is in one rank's span, where ranks share the bucket; otherwise all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strategies.core.layout import Bucket


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of parameter ``index``, which begin at element ``at`` of this rank's span."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def head_of(spec: Bucket, rank: int) -> tuple[int, int]:
    """Of the parameter that began before the span of ``rank`` and goes on in it: the rank in whose span it began, and
    how many elements of this span it takes, from the first one on; ``rank`` itself and 0 if there is none.
    """
    for piece in pieces_of(spec, rank):
        if piece.start > 0:
            return spec.offsets[piece.index] // spec.share, piece.size
    return rank, 0


def pieces_of(spec: Bucket, rank: int) -> Iterator[Piece]:
    """The parameters, or parts of them, in the span of ``rank``."""
    low, high = rank * spec.share, (rank + 1) * spec.share
    for index, (offset, size) in enumerate(zip(spec.offsets, spec.sizes, strict=True)):
        start, stop = max(offset, low), min(offset + size, high)
        if start < stop or (size == 0 and (spec.ways == 1 or low <= offset < high)):
            yield Piece(index, start - offset, stop - offset, start - low)
