"""Parts of one rank's span of a bucket.

piece     a parameter, or the part of it that is in the span
stretch   elements whose masters and moments are at hand together: the whole span where they are in memory, else
          what one slot of the window holds of what rests on the disk (``disk_state.py``)
chunk     what an update rule takes of a piece in one call; see [Note: split points] in ``updating/updates.py``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from torch import Tensor

from deepstow.strategies.core.layout import Bucket

AtHand: TypeAlias = Callable[..., AbstractContextManager[None]]


class Stretch(NamedTuple):
    """Elements ``start`` to ``stop`` of a rank's span: flat views of their masters, None if they have none, and of
    their moments. On the disk they have their values inside of ``at_hand()``, and keep what is written inside of
    ``at_hand(writes=True)``; ``DiskState.held`` has the options.
    """

    start: int
    stop: int
    master: Tensor | None
    moments: list[Tensor]
    at_hand: AtHand

    def of_masters(self, span: Tensor) -> Stretch:
        """With its part of ``span``, which all are in, as its masters."""
        return self._replace(master=span[self.start : self.stop])


def in_memory(*, writes: bool = False, behind: bool = False) -> AbstractContextManager[None]:
    """What rests in memory is always at hand."""
    return nullcontext()


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``start`` to ``stop`` of this rank's span, of parameter ``index``; ``last``: of what it has of it."""

    index: int
    start: int
    stop: int
    last: bool


def chunks_of(pieces: Iterable[Piece], limit: int, stretch: Stretch) -> Iterator[list[Chunk]]:
    """What is in ``stretch`` of these pieces, cut into chunks and grouped into calls of at most ``limit`` elements."""
    call: list[Chunk] = []
    room = limit
    for whole, piece in ((full, cut) for full in pieces for cut in full.within(stretch)):
        for start in range(0, piece.size, limit):
            stop = min(piece.size, start + limit)
            if stop - start > room:
                yield call
                call, room = [], limit
            ends = piece.at + stop == whole.at + whole.size
            call.append(Chunk(piece.index, piece.at + start, piece.at + stop, ends))
            room -= stop - start
    if call:
        yield call
