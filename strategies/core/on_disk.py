"""Where in the files of the disk tier, one on each drive, the state of each bucket is, and the size of those files."""

from __future__ import annotations

from strategies.core.facts import Home
from strategies.core.layout import Layout, aligned


def part_bytes(num_bytes: int, drives: int) -> int:
    """What each of so many drives has of state of ``num_bytes``; the last one may have less."""
    return aligned(-(-num_bytes // drives), Home.HOST)


def disk_offsets(layout: Layout) -> dict[str, int]:
    """Where in each file its part of the state of each bucket that is on the disk begins, by name."""
    found, end = dict[str, int](), 0
    for bucket in layout.buckets:
        if bucket.on_disk:
            found[bucket.name] = end
            end += part_bytes(bucket.state_bytes(layout.moments), len(layout.disk))
    return found


def file_bytes(layout: Layout) -> int:
    """The size of each file."""
    return sum(part_bytes(b.state_bytes(layout.moments), len(layout.disk)) for b in layout.buckets if b.on_disk)


def disk_bytes(layout: Layout) -> int:
    """The size of all files of one rank."""
    return len(layout.disk) * file_bytes(layout)
