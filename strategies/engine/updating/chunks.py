"""Chunks: pieces of parameters that an update rule takes in one call. See [Note: split points] in ``updates.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.memory.stretches import Stretch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``start`` to ``stop`` of this rank's span, of parameter ``index``; ``last``: of what it has of it."""

    index: int
    start: int
    stop: int
    last: bool


def chunks_of(bucket: BucketState, touched: Sequence[int], limit: int, stretch: Stretch) -> Iterator[list[Chunk]]:
    """What is in ``stretch`` of this rank's pieces of ``touched``, cut into chunks and grouped into calls of at most
    ``limit`` elements.
    """
    call: list[Chunk] = []
    room = limit
    for whole, piece in ((full, cut) for full in bucket.pieces_in(touched) for cut in full.within(stretch)):
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
