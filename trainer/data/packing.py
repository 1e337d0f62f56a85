"""Pack documents into rows of at most ``max_length`` tokens. Pure functions on integers.

A *span* is a piece of one document. A row has every token of its spans once. ``position_ids`` start at 0 with each
span, which tells attention where documents end; the first token of a span is not a target, since nothing before it
predicts it. So a packed row trains on the same tokens in the same contexts as the unpacked spans.

Spans are packed by best-fit decreasing: longest first, each into the fullest row that it fits into. That needs at most
11/9 of the fewest possible rows (plus one), and on text wastes well under one per cent.
"""

import bisect
import hashlib
from collections import defaultdict
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
    """Cut spans so that none is longer than ``max_length`` (at least 3) or has a single token, hence no target."""
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
    """Documents for training and for evaluation, each in order; of a single one the last ``fraction`` is held out."""
    if len(spans) == 1:
        document, start, stop = spans[0]
        cut = stop - min(max(2, round((stop - start) * fraction)), (stop - start) // 2)
        return [Span(document, start, cut)], [Span(document, cut, stop)]
    held = min(max(1, round(len(spans) * fraction)), len(spans) - 1)
    # A hash and not a generator: the shuffle of a library may change with its version.
    ranked = sorted(range(len(spans)), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    chosen = set(ranked[:held])
    train = [span for index, span in enumerate(spans) if index not in chosen]
    return train, [spans[index] for index in sorted(chosen)]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: rows of indices into ``lengths``, each summing to at most ``capacity``; ties by index.

    Rows are ordered by their first index and indices ascend, so neighbours stay near each other. Time is n log n.
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


def rows(
    spans: Sequence[Span],
    read: Callable[[int], tuple[Tokens, Tokens]],
    max_length: int,
    packing: bool,
) -> Iterator[dict[str, Tokens]]:
    """The rows of a data set, packed (then with ``position_ids``) or one span each; ``read`` gives ids and labels."""
    lengths = [span.stop - span.start for span in spans]
    groups = pack(lengths, max_length) if packing else [[index] for index in range(len(spans))]
    for group in groups:
        pieces = defaultdict[str, list[Tokens]](list)
        for document, start, stop in (spans[index] for index in group):
            ids, labels = read(document)
            pieces["input_ids"].append(ids[start:stop])
            pieces["labels"].append(labels[start:stop].copy())  # they are views of a file
            pieces["labels"][-1][0] = MASKED
            if packing:
                pieces["position_ids"].append(np.arange(stop - start, dtype=np.int32))
        yield {name: np.concatenate(parts) for name, parts in pieces.items()}
