"""Pack documents into rows of at most ``max_length`` tokens. Pure functions on integers.

A *span* is a piece of one document. A row has every token of its spans once. ``position_ids`` start at 0 with each
span, which tells attention where documents end; the first token of a span is not a target, since nothing before it
predicts it. So a packed row trains on the same tokens in the same contexts as the unpacked spans.

Spans are packed by best-fit decreasing: longest first, each into the fullest row that it fits into. That needs at most
11/9 of the fewest possible rows (plus one), and on text wastes well under one per cent. Spans are arrays of 12 bytes
each, which may be in a file (``mapped.py``), as may be all else that is known of each; documents are read one by one.
"""

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from deepstow.trainer.data.mapped import BLOCK, Make, blocks

Tokens = NDArray[np.int32]
Spans = NDArray[np.int32]  # [number, 3]: a document, and the start and stop of a piece of it
MASKED = -100  # the label of a token that is not trained on: what torch's cross entropy ignores


def whole(lengths: Sequence[int] | NDArray[np.integer], make: Make = np.empty) -> Spans:
    """Each document as one span."""
    spans = make((len(lengths), 3), np.int32)
    for start, block in zip(range(0, len(lengths), BLOCK), blocks(spans), strict=True):
        block[:, 0], block[:, 1] = np.arange(start, start + len(block), dtype=np.int32), 0
        block[:, 2] = lengths[start : start + len(block)]
    return spans


def lengths_of(spans: Spans, make: Make = np.empty) -> NDArray[np.int32]:
    """Tokens of each span."""
    lengths = make((len(spans),), np.int32)
    for block, out in zip(blocks(spans), blocks(lengths), strict=True):
        out[:] = block[:, 2] - block[:, 1]
    return lengths


def chunk(spans: Spans, max_length: int) -> Spans:
    """Cut spans so that none is longer than ``max_length`` (at least 3) or has a single token, hence no target."""
    assert max_length >= 3, "two pieces of at least two tokens must fit into max_length + 1"
    if all((block[:, 2] - block[:, 1] <= max_length).all() for block in blocks(spans)):
        return spans
    lengths = spans[:, 2] - spans[:, 1]
    counts = np.maximum(-(-lengths // max_length), 1)
    ends = np.cumsum(counts)
    pieces = np.repeat(spans, counts, axis=0)
    pieces[:, 1] += max_length * (np.arange(len(pieces)) - np.repeat(ends - counts, counts)).astype(np.int32)
    pieces[ends - 1, 1] -= (lengths % max_length == 1) & (counts > 1)  # the last piece gets a second token
    inner = np.ones(len(pieces), bool)
    inner[ends - 1] = False
    pieces[:-1, 2] = np.where(inner[:-1], pieces[1:, 1], pieces[:-1, 2])
    return pieces


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """The numbers below ``count`` in an order of the seed. By a hash, since the shuffle of a library may change."""
    keys = (int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big") for index in range(count))
    return np.argsort(np.fromiter(keys, np.uint64, count), kind="stable")


def split(spans: Spans, fraction: float, seed: int, make: Make = np.empty) -> tuple[Spans, Spans]:
    """Documents for training and for evaluation, each in order; of a single one the last ``fraction`` is held out."""
    if len(spans) == 1:
        document, start, stop = spans[0].tolist()
        cut = stop - min(max(2, round((stop - start) * fraction)), (stop - start) // 2)
        return np.array([[document, start, cut]], np.int32), np.array([[document, cut, stop]], np.int32)
    held_out = np.zeros(len(spans), bool)
    held_out[shuffled(len(spans), seed)[: min(max(1, round(len(spans) * fraction)), len(spans) - 1)]] = True
    train, at = make((len(spans) - int(held_out.sum()), 3), np.int32), 0
    for block, out in zip(blocks(spans), blocks(held_out), strict=True):
        trained = block[~out]
        train[at : at + len(trained)] = trained
        at += len(trained)
    return train, spans[held_out]


def weighted(spans: Spans, weight: float, seed: int) -> Spans:
    """All spans ``weight`` times, in order; of a fraction of all tokens, the spans that the seed chooses first."""
    times = np.full(len(spans), int(weight))
    order, lengths = shuffled(len(spans), seed), (spans[:, 2] - spans[:, 1]).astype(np.int64)
    times[order[np.cumsum(lengths[order]) <= (weight - int(weight)) * lengths.sum()]] += 1
    return np.repeat(spans, times, axis=0)


def weights_of(shares: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """The weights with which data sets of so many ``tokens`` have these shares of all; the largest is 1."""
    least = min(count / share for share, count in zip(shares, tokens, strict=True))
    weights = (share * least / count for share, count in zip(shares, tokens, strict=True))
    return [1.0 if abs(weight - 1) < 1e-9 else weight for weight in weights]  # not all of it but one row


def pack(lengths: Sequence[int] | NDArray[np.integer], capacity: int, make: Make = np.empty) -> Iterator[list[int]]:
    """Best-fit decreasing: rows of indices into ``lengths``, each summing to at most ``capacity``; ties by index.

    Rows are ordered by their first index and indices ascend, so neighbours stay near each other. In memory are a few
    numbers for each room that a row can have; what is known of each span and row is in arrays that ``make`` makes.
    """
    sizes = np.asarray(lengths, np.int32)
    order, _ = _grouped(sizes, capacity + 1, make, largest_first=True)
    row_of, below = make((len(sizes),), np.int32), make((len(sizes),), np.int32)
    top = [-1] * capacity  # of the stack of open rows with each room; ``below`` has those under it
    rooms: list[int] = []  # those of open rows, ascending
    num_rows = 0
    for block in blocks(order):
        block_rows = []
        for index, length in zip(block.tolist(), sizes[block].tolist(), strict=True):
            assert 0 < length <= capacity, f"span {index} has {length} tokens, a row has {capacity}"
            place = bisect.bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                row = top[room]
                top[room] = int(below[row])
                if top[room] < 0:
                    del rooms[place]
            else:
                room, row = capacity, num_rows
                num_rows += 1
            block_rows.append(row)
            if room_left := room - length:
                if top[room_left] < 0:
                    bisect.insort(rooms, room_left)
                below[row], top[room_left] = top[room_left], row
        row_of[block] = block_rows
    members, ends = _grouped(row_of, num_rows, make)
    for start, rows_of in zip(range(0, len(row_of), BLOCK), blocks(row_of), strict=True):
        begins = np.where(rows_of > 0, ends[rows_of - 1], 0)
        for first in np.flatnonzero(members[begins] == np.arange(start, start + len(rows_of))):
            yield members[begins[first] : ends[rows_of[first]]].tolist()


def _grouped(
    numbers: NDArray[np.int32], kinds: int, make: Make, *, largest_first: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The places of numbers below ``kinds``: those of each number together, ascending; and where those of each end."""

    def keys() -> Iterator[NDArray[np.int32]]:
        return (kinds - 1 - block if largest_first else block for block in blocks(numbers))

    ends, places = make((kinds,), np.int32), make((len(numbers),), np.int32)
    ends[:] = 0
    for block in keys():
        present, number = np.unique(block, return_counts=True)
        ends[present] += number.astype(np.int32)
    total = 0
    for block in blocks(ends):  # where each begins, until its places are written
        sums = total + np.cumsum(block)
        block[:], total = sums - block, int(sums[-1])
    for start, block in zip(range(0, len(numbers), BLOCK), keys(), strict=True):
        order = np.argsort(block, kind="stable")
        present, first, number = np.unique(block[order], return_index=True, return_counts=True)
        places[np.repeat(ends[present] - first, number) + np.arange(len(order))] = start + order
        ends[present] += number.astype(np.int32)
    return places, ends


def rows(
    spans: Spans, read: Callable[[int], tuple[Tokens, Tokens]], max_length: int, packing: bool, make: Make = np.empty
) -> Iterator[dict[str, Tokens]]:
    """The rows of a data set, packed (then with ``position_ids``) or one span each; ``read`` gives ids and labels."""
    packed = pack(lengths_of(spans, make), max_length, make) if packing else None
    for group in packed or ([index] for index in range(len(spans))):
        pieces = defaultdict[str, list[Tokens]](list)
        for document, start, stop in spans[group].tolist():
            ids, labels = read(document)
            pieces["input_ids"].append(ids[start:stop])
            pieces["labels"].append(labels[start:stop].copy())  # they are views of a file
            pieces["labels"][-1][0] = MASKED
            if packing:
                pieces["position_ids"].append(np.arange(stop - start, dtype=np.int32))
        yield {name: np.concatenate(arrays) for name, arrays in pieces.items()}
