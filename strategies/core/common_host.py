"""What ranks on one machine read of each other's host memory (``common_host`` of the layout)."""

from __future__ import annotations

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Bucket, Item, Layout, Site, aligned, rounded_to_fetch


def read_by_all(bucket: Bucket, layout: Layout) -> Item | None:
    """What all ranks read of each other's memory on the host to have the whole weight.

    The copy of a weight that travels, unless it is a slot that many pass, or on the disk; of one that stays, and is
    updated on the host, what the update leaves there. None: they get it over the network.
    """
    if not layout.common_host or bucket.shards == 1:
        return None
    if not bucket.resident:
        return None if bucket.weight_on_disk or rounded_to_fetch(bucket, layout) else Item.COPY
    left = Item.PARKED if bucket.mixed else Item.MASTER
    return left if bucket.site is Site.HOST else None


def common_bytes(layout: Layout) -> int:
    """Bytes of the host's arena, from its start, that all ranks read."""
    return sum(aligned(b.weight_bytes // b.shards, Tier.HOST) for b in layout.buckets if read_by_all(b, layout))


def mapped_bytes(layout: Layout) -> int:
    """Bytes of the other ranks' memory that this one maps. The system counts them as this process's, too."""
    return max((bucket.shards - 1 for bucket in layout.buckets), default=0) * common_bytes(layout)
