"""What need not rest on the disk, though it was to be there for want of memory: some weights stay on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from strategies.core.facts import Home
from strategies.core.layout import Bucket, Layout, aligned, needs
from strategies.planner.addresses import place

Change: TypeAlias = tuple[int, Any]  # of a bucket, by index: fields
COPY: Any = {"copy_on_disk": False}
ALL: Any = {"on_disk": False}


def off_disk(layout: Layout, host_room: int) -> Layout:
    """``layout``, of which it is known what travels, with as much off the disk as the host has room for, weights
    first.
    """
    there = [index for index, bucket in enumerate(layout.buckets) if bucket.on_disk]
    if not there:
        return layout
    copies = [(index, COPY) for index in there if layout.buckets[index].copy_on_disk]
    changes = copies + [(index, ALL) for index in sorted(there, key=lambda index: layout.buckets[index].state_on_disk)]
    for some in (changes, copies):  # and their slots
        if some and place(less := _changed(layout, some)).num_bytes(Home.HOST) <= host_room:
            layout = less
            break
    room, taken = host_room - place(layout).num_bytes(Home.HOST), list[Change]()
    kept = set[int]()  # whose weights stay there, and so their state
    for index, change in changes:
        bucket = layout.buckets[index] if change is COPY else replace(layout.buckets[index], copy_on_disk=False)
        size = _held(replace(bucket, **change), layout) - _held(bucket, layout)
        if size > room or index in kept:
            kept.add(index)
        else:
            room, taken = room - size, [*taken, (index, change)]
    return _changed(layout, taken)


def _held(bucket: Bucket, layout: Layout) -> int:
    """Bytes of the host, without slots."""
    found = (need for need in needs(bucket, layout) if need.home is Home.HOST and not need.passes)
    return sum(aligned(need.num_bytes, Home.HOST) for need in found)


def _changed(layout: Layout, changes: Iterable[Change]) -> Layout:
    buckets = list(layout.buckets)
    for index, change in changes:
        buckets[index] = replace(buckets[index], **change)
    return replace(layout, buckets=tuple(buckets))
