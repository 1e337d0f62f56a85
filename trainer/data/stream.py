"""Rows that are made while training reads them (``data.streaming``).

A stream has no length, and Hugging Face's Trainer needs ``max_steps`` for it. Where ``data.rows`` declares one, each
pass has exactly as many rows, so that steps, schedules and the place of a resumed run are right. If there are more, the
others are left out, if there are fewer, the first ones come again, and either is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data
from datasets import Features, IterableDataset, List, Value

from deepstow.trainer.data import packing
from deepstow.trainer.data.encoding import Part, batched, encoded, fitting
from deepstow.trainer.data.formats import Encoder
from deepstow.trainer.data.packing import Tokens
from deepstow.trainer.data.report import Document, Say
from deepstow.trainer.data.sources import Source
from deepstow.trainer.errors import DataError

_WINDOW = 512  # documents that are packed together


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream of a declared length, which Hugging Face's Trainer counts epochs by."""

    def __init__(self, rows: IterableDataset, length: int) -> None:
        self._rows, self._length = rows, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return self._length


def stream(source: Source, encoder: Encoder, say: Say) -> IterableDataset | Stream:
    """The rows of a source, of a declared length if ``data.rows`` has one; what is wrong with it is said."""
    names = ["input_ids", "labels", "position_ids"] if encoder.options.packing else ["input_ids", "labels"]
    features = Features({name: List(Value("int32")) for name in names})
    arguments = {"source": source, "encoder": encoder, "say": say}
    dataset: IterableDataset = IterableDataset.from_generator(_stream_rows, features=features, gen_kwargs=arguments)
    return dataset if encoder.options.rows is None else Stream(dataset, encoder.options.rows)


def _stream_rows(source: Source, encoder: Encoder, say: Say) -> Iterator[dict[str, Tokens]]:
    """The rows of one pass: all, or as many as are declared."""
    count, declared = 0, encoder.options.rows
    while True:
        earlier = count
        for row in _rows_once(source, encoder):
            if count == declared:
                if not earlier:
                    say(f"data.rows = {declared:,}: the data has more; the others are in no pass")
                return
            count += 1
            yield row
        if declared is None or count == declared:
            return
        if not count:
            raise DataError(f"{source.name}: there are no rows")
        if not earlier:
            say(f"data.rows = {declared:,}: the data has {count:,}, so that each pass takes its first rows again")


def _rows_once(source: Source, encoder: Encoder) -> Iterator[dict[str, Tokens]]:
    """Rows one by one; documents of one window may be packed together."""

    def documents() -> Iterator[tuple[Tokens, Tokens]]:
        for result in encoded(Part(source, encoder), None):
            if isinstance(result, str):
                raise DataError(result)
            if isinstance(result, Document):
                yield np.array(result.ids, np.int32), np.array(result.labels, np.int32)

    for window in batched(documents(), _WINDOW if encoder.options.packing else 1):
        spans = fitting(encoder, packing.whole([len(ids) for ids, _ in window]), window.__getitem__)
        yield from packing.rows(spans, window.__getitem__, encoder.options.max_length, encoder.options.packing)
