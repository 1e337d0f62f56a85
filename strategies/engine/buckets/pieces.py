"""Which parameters, or parts of them, are in one rank's span of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepstow.strategies.core.layout import Bucket
from deepstow.strategies.engine.memory.stretches import Stretch


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

    def within(self, stretch: Stretch) -> Iterator[Piece]:
        """What of it lies in ``stretch``: a part of it, or nothing."""
        low, high = max(self.at, stretch.start), min(self.at + self.size, stretch.stop)
        if low < high or low == high == self.at:
            yield replace(self, start=self.start + low - self.at, stop=self.start + high - self.at, at=low)


def pieces_of(spec: Bucket, rank: int) -> Iterator[Piece]:
    """The parameters, or parts of them, in the span of ``rank``."""
    low, high = rank * spec.share, (rank + 1) * spec.share
    for index, (offset, size) in enumerate(zip(spec.offsets, spec.sizes, strict=True)):
        start, stop = max(offset, low), min(offset + size, high)
        if start < stop or (size == 0 and (spec.shards == 1 or low <= offset < high)):
            yield Piece(index, start - offset, stop - offset, start - low)
