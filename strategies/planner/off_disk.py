"""What need not rest on the disk, though it was to be there for want of memory: some weights stay on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.core.facts import Home
from strategies.core.layout import Bucket, Layout, aligned, needs
from strategies.planner.addresses import place


def off_disk(layout: Layout, host_room: int) -> Layout:
    """``layout``, of which it is known what travels, with as much off the disk as the host has room for, weights
    first.
    """
    there = [index for index, bucket in enumerate(layout.buckets) if bucket.on_disk]
    if not there:
        return layout
    without = _without(layout, there)
    if place(without).num_bytes(Home.HOST) <= host_room:
        return without
    room, buckets = host_room - place(layout).num_bytes(Home.HOST), list(layout.buckets)
    copies: list[tuple[int, Any]] = [(i, {"copy_on_disk": False}) for i in there if buckets[i].copy_on_disk]
    others = sorted(there, key=lambda index: layout.buckets[index].state_on_disk)
    for index, change in (*copies, *((index, {"on_disk": False}) for index in others)):
        less = replace(buckets[index], **change)
        size = _held(less, layout) - _held(buckets[index], layout)
        if size <= room and not less.copy_on_disk:
            room, buckets[index] = room - size, less
    return replace(layout, buckets=tuple(buckets))


def _held(bucket: Bucket, layout: Layout) -> int:
    """Bytes of the host, without slots."""
    found = (need for need in needs(bucket, layout) if need.home is Home.HOST and not need.passes)
    return sum(aligned(need.num_bytes, Home.HOST) for need in found)


def _without(layout: Layout, indices: list[int]) -> Layout:
    buckets = list(layout.buckets)
    for index in indices:
        buckets[index] = replace(buckets[index], on_disk=False, copy_on_disk=False)
    return replace(layout, buckets=tuple(buckets))
