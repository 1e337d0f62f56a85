"""Documents into rows of at most ``max_length`` tokens. Pure functions on integers.

A *span* is a piece of one document. Long text becomes several spans and loses nothing; a packed row is several
spans one behind the other. What a row must keep, whatever it holds:

- every token of every span exactly once, and never more than ``max_length`` of them;
- ``position_ids`` start at 0 with each span, by which attention knows where documents end;
- the first token of a span is never a target: nothing that could predict it is in sight.

So a packed row trains on exactly the tokens, in exactly the contexts, of the unpacked spans.

Which spans share a row is best-fit decreasing: longest first, each into the fullest row it fits. It never
needs more than 11/9 of the least possible rows (plus one), and on text, where short pieces fill the gaps, in
practice wastes well under one per cent. Ties are broken by index: the same lengths always give the same rows.
"""

import bisect
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
MASKED = -100  # the label of a token that is not trained on: what torch's cross entropy ignores


class Span(NamedTuple):
    """Tokens [start, stop) of one document."""

    document: int
    start: int
    stop: int


def whole(lengths: Sequence[int]) -> list[Span]:
    """Each document as one span."""
    return [Span(document, 0, length) for document, length in enumerate(lengths)]


def chunk(spans: Sequence[Span], max_length: int) -> list[Span]:
    """Cut spans so that none is longer than ``max_length`` (at least 3), and none is one token long.

    A lone token has no target: a row of it has nothing to train on. Where one would be left over, the piece
    before it gives one up.
    """
    assert max_length >= 3, "two pieces of at least two tokens must fit into max_length + 1"
    pieces = []
    for document, start, stop in spans:
        while stop - start > max_length:
            cut = start + max_length - (stop - start == max_length + 1)
            pieces.append(Span(document, start, cut))
            start = cut
        pieces.append(Span(document, start, stop))
    return pieces


def split(spans: Sequence[Span], fraction: float, seed: int) -> tuple[list[Span], list[Span]]:
    """Documents for training and for evaluation, each in order; which ones follows from ``seed`` alone.

    A single document cannot be dealt out: its last ``fraction`` is held out instead.
    """
    if len(spans) == 1:
        document, start, stop = spans[0]
        cut = stop - min(max(2, round((stop - start) * fraction)), (stop - start) // 2)
        return [Span(document, start, cut)], [Span(document, cut, stop)]
    held = min(max(1, round(len(spans) * fraction)), len(spans) - 1)
    # A hash, not a generator: no library's shuffle can change under a finished run.
    ranked = sorted(range(len(spans)), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    chosen = set(ranked[:held])
    train = [span for index, span in enumerate(spans) if index not in chosen]
    return train, [spans[index] for index in sorted(chosen)]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: rows of indices into ``lengths``, each summing to at most ``capacity``.

    Rows are in the order of their first index and indices ascend, so neighbours stay near each other. Time is
    n log n: rows with equal room are one stack, and the distinct rooms are kept sorted.
    """
    rooms: list[int] = []  # the distinct rooms of open rows, ascending
    rows_by_room: dict[int, list[list[int]]] = {}
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        assert 0 < length <= capacity, f"span {index} has {length} tokens, a row has {capacity}"
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[place]
        else:
            room, row = capacity, []
            rows.append(row)
        row.append(index)
        if room > length:
            if room - length not in rows_by_room:
                bisect.insort(rooms, room - length)
            rows_by_room.setdefault(room - length, []).append(row)
    return sorted(sorted(row) for row in rows)


def assemble(spans: Sequence[tuple[Tokens, Tokens]], positions: bool) -> dict[str, Tokens]:
    """One row from the (ids, labels) of its spans: ``input_ids``, ``labels`` and, if asked, ``position_ids``."""
    labels = np.concatenate([labels for _, labels in spans])  # a copy: the spans are views of a file
    starts = np.cumsum([0, *(len(ids) for ids, _ in spans[:-1])])
    labels[starts] = MASKED
    row = {"input_ids": np.concatenate([ids for ids, _ in spans]), "labels": labels}
    if positions:
        row["position_ids"] = np.concatenate([np.arange(len(ids), dtype=np.int32) for ids, _ in spans])
    return row


def rows(
    spans: Sequence[Span],
    read: Callable[[int], tuple[Tokens, Tokens]],
    max_length: int,
    packing: bool,
) -> Iterator[dict[str, Tokens]]:
    """The rows of a data set, packed or one span each; ``read(document)`` gives its (ids, labels)."""
    lengths = [span.stop - span.start for span in spans]
    groups = pack(lengths, max_length) if packing else [[index] for index in range(len(spans))]
    for group in groups:
        pieces = []
        for document, start, stop in (spans[index] for index in group):
            ids, labels = read(document)
            pieces.append((ids[start:stop], labels[start:stop]))
        yield assemble(pieces, positions=packing)
