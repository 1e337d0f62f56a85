"""Where in the file of the disk tier the state of each bucket is, and the size of that file."""

from __future__ import annotations

from strategies.core.facts import Home
from strategies.core.layout import Layout, aligned


def disk_offsets(layout: Layout) -> dict[str, int]:
    """Where in the file the state of each bucket that is on the disk begins, by name. Its size is that of WINDOW."""
    found, end = dict[str, int](), 0
    for bucket in layout.buckets:
        if bucket.on_disk:
            found[bucket.name] = end
            end += aligned(bucket.state_bytes(layout.moments), Home.HOST)
    return found


def disk_bytes(layout: Layout) -> int:
    """The size of that file."""
    return sum(aligned(b.state_bytes(layout.moments), Home.HOST) for b in layout.buckets if b.on_disk)
