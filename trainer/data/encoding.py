"""The rows of a source, tokenised in batches, in this process or in several.

Invariant. Results come in the order of the rows, whoever makes them. Bad rows are results, too (``report.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

import numpy as np

from deepstow.trainer.data import packing
from deepstow.trainer.data.formats import Encoder
from deepstow.trainer.data.packing import MASKED, Spans, Tokens
from deepstow.trainer.data.report import Encoded
from deepstow.trainer.data.sources import Row, Source
from deepstow.trainer.errors import DataError

T = TypeVar("T")

_BATCH = 256  # rows tokenised in one call


class Part(NamedTuple):
    """One of the data sets that are mixed."""

    source: Source
    encoder: Encoder
    weight: float = 1.0
    token_share: float | None = None


def encoded(part: Part, num_proc: int | None) -> Iterator[Encoded]:
    """One result per row, in order. A fast tokenizer uses all cores; ``num_proc`` is for the others."""
    encoder = part.encoder
    rows = part.source.rows(list(encoder.columns.values()))
    batches = batched(itertools.islice(rows, encoder.options.limit), _BATCH)
    if num_proc is None or num_proc == 1:
        yield from itertools.chain.from_iterable(map(encoder.encode, batches))
        return
    # Spawned, not forked: a fork of a process that holds threads or a process group can hang.
    with ProcessPoolExecutor(num_proc, get_context("spawn"), _start_worker, (encoder,)) as pool:
        try:
            for group in batched(batches, 4 * num_proc):  # bounds what is read ahead
                yield from itertools.chain.from_iterable(pool.map(_work, group))
        except BrokenProcessPool:
            raise DataError("data.num_proc: a tokenising process died, out of memory?; use fewer") from None


_worker: Encoder  # of a worker process, set once by its initializer instead of being sent with every batch


def _start_worker(encoder: Encoder) -> None:
    global _worker
    _worker = encoder


def _work(rows: list[Row]) -> list[Encoded]:
    return _worker.encode(rows)


def fitting(encoder: Encoder, spans: Spans, read: Callable[[int], tuple[Tokens, Tokens]]) -> Spans:
    """Spans that fit into a row: cut where documents are to be split, without pieces that nothing is trained on in."""
    if encoder.excess != "split":
        return spans
    cuts, limit = packing.chunk(spans, encoder.options.max_length), encoder.options.max_length
    if encoder.format.splits:
        return cuts
    cut = np.isin(cuts[:, 0], spans[spans[:, 2] - spans[:, 1] > limit, 0])
    useless = [
        index
        for index in np.flatnonzero(cut)
        if (read(cuts[index, 0])[1][cuts[index, 1] + 1 : cuts[index, 2]] == MASKED).all()
    ]
    return np.delete(cuts, useless, axis=0)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
