"""Where in the files of the disk tier, one on each drive, the state of each bucket is, and the size of those files.

State rests there in pieces, of ``window_elements`` of a bucket's span and one of what is left: its masters, if it has
any, then one moment after the other. Pieces pass the slots of the window in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strategies.core.facts import Home
from strategies.core.layout import Bucket, Layout, aligned


@dataclass(frozen=True, slots=True)
class Piece:
    """State of elements ``start`` to ``stop`` of one rank's span of a bucket, from ``offset`` on in each file."""

    start: int
    stop: int
    slot: int
    offset: int


def part_bytes(num_bytes: int, drives: int) -> int:
    """What each of so many drives has of state of ``num_bytes``; the last one may have less."""
    return aligned(-(-num_bytes // drives), Home.HOST)


def pieces_on_disk(layout: Layout) -> Iterator[tuple[int, Piece]]:
    """Every piece, with the index of its bucket, in the order of the files."""
    number = end = 0
    for index, bucket in enumerate(layout.buckets):
        for start in range(0, bucket.share if bucket.on_disk else 0, layout.window_elements):
            stop = min(start + layout.window_elements, bucket.share)
            yield index, Piece(start, stop, number % layout.window_slots, end)
            number += 1
            end += part_bytes(4 * (layout.moments + bucket.mixed) * (stop - start), len(layout.disk))


def bytes_in_file(bucket: Bucket, layout: Layout) -> int:
    """What each file has of the state of ``bucket``, if that is on the disk."""
    numbers, drives = 4 * (layout.moments + bucket.mixed), len(layout.disk)
    whole, rest = divmod(bucket.share, layout.window_elements)
    return whole * part_bytes(numbers * layout.window_elements, drives) + part_bytes(numbers * rest, drives)


def file_bytes(layout: Layout) -> int:
    """The size of each file."""
    return sum(bytes_in_file(bucket, layout) for bucket in layout.buckets if bucket.on_disk)


def disk_bytes(layout: Layout) -> int:
    """The size of all files of one rank."""
    return len(layout.disk) * file_bytes(layout)
