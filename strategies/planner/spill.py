"""What rests on the disk for want of memory: as little as lets the host have the rest, and all copies of weights.

First the state of blocks, from the last one on, which the next forward needs last, and frozen weights that may leave
the device. Then the weights of trained blocks, where that frees anything: a copy in whose place a gradient waits would
leave the gradient. Embedding and head are last: where they have less than a piece of the window, its slots are as large
as they are. Once it is known what travels, ``off_disk`` takes back what the host has room for after all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Bucket, Layout, Site, aligned, needs
from deepstow.strategies.core.on_disk import bytes_on_disk, hold_weights, weight_bytes_on_disk
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.places import Place, Placement, Places

Change: TypeAlias = tuple[int, Any]  # the fields of a bucket, by index, that become others
COPY: Any = {"copy_on_disk": False}  # a trained weight leaves the disk
ALL: Any = {"on_disk": False}  # state, or a frozen weight, does


def spilled(places: Places, placement: Placement, host_room: float) -> Placement:
    """``placement`` with so much on the disk, or with as much as may be there."""
    layout, disk_bytes = places.empty, places.request.disk_bytes
    if not layout.disk:
        return placement
    none = tuple(_resting(at, state=False, copy=False) if at.on_disk else at for at in placement)
    may = list[tuple[int, bool]]()
    states = set[int]()
    total = 0
    largest = 0
    for index, copy, size in _moves(places, layout, none):
        whole = max(largest, size if copy or none[index].site is Site.NONE else 0)
        # Weights are whole on one drive: the fullest has at most so much more than the others.
        uneven = (len(layout.disk) - 1) * whole
        if size and total + size + uneven <= disk_bytes and (not copy or index in states):
            may.append((index, copy))
            states.add(index)
            total, largest = total + size, whole

    def with_some(number: int) -> Placement:
        now = list(none)
        for index, copy in may[:number]:
            now[index] = _resting(none[index], state=True, copy=copy)
        return tuple(now)

    def host(number: int) -> int:
        sizes = places.sizes(with_some(number))
        return sizes.host + sizes.copies

    if not may or host(0) <= host_room:
        return none
    of_blocks = [copy for index, copy in may if index in places.of_blocks]
    most = min(len(may), len(of_blocks), of_blocks.count(False), key=host)
    return with_some(bisect_left(range(most), True, lo=min(1, most), key=lambda number: host(number) <= host_room))


@cache
def _resting(at: Place, *, state: bool, copy: bool) -> Place:
    """``at``, with its state, or a frozen weight, on the disk, and a trained weight."""
    return at._replace(on_disk=state, copy_on_disk=copy)


def _moves(places: Places, layout: Layout, none: Placement) -> Iterator[tuple[int, bool, int]]:
    """What may go there, in order: of which bucket, whether the weight of a trained one, and its bytes there."""
    away = [index for index, at in enumerate(none) if places.may_leave(index, at)]
    weights = hold_weights(layout.disk)
    frozen = {index for index in away if none[index].site is Site.NONE and weights}
    rests = [index for index, at in enumerate(none) if at.site is Site.HOST or index in frozen]
    rests.sort(key=lambda index: (index not in places.of_blocks, index in frozen, -index))
    for index in rests:
        if index in places.of_blocks:
            yield index, False, bytes_on_disk(places.buckets[index], layout)
    for index in reversed(away) if weights else ():
        if index in places.of_blocks and none[index].site is Site.HOST:
            alone, both = (places.hosted(index, _resting(none[index], state=True, copy=copy)) for copy in (False, True))
            if both < alone:
                bucket = replace(places.buckets[index], copy_on_disk=True)  # in fp32 the state has its master as well
                more = bytes_on_disk(bucket, layout) - bytes_on_disk(places.buckets[index], layout)
                yield index, True, more + weight_bytes_on_disk(bucket)
    for index in rests:
        if index not in places.of_blocks:
            yield index, False, bytes_on_disk(places.buckets[index], layout)


def off_disk(layout: Layout, host_room: int) -> Layout:
    """``layout``, of which it is known what travels, with as much off the disk as the host has room for, weights
    first.
    """
    there = [index for index, bucket in enumerate(layout.buckets) if bucket.on_disk]
    if not there:
        return layout
    copies = [(index, COPY) for index in there if layout.buckets[index].copy_on_disk]
    changes = copies + [(index, ALL) for index in sorted(there, key=lambda index: layout.buckets[index].state_on_disk)]
    for some in (changes, copies):  # all of them: then the host needs no slots for them, either
        if some and place(less := _changed(layout, some)).num_bytes(Tier.HOST) <= host_room:
            layout = less
            break
    room, taken = host_room - place(layout).num_bytes(Tier.HOST), list[Change]()
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
    found = (need for need in needs(bucket, layout) if need.tier is Tier.HOST and not need.passes)
    return sum(aligned(need.num_bytes, Tier.HOST) for need in found)


def _changed(layout: Layout, changes: Iterable[Change]) -> Layout:
    buckets = list(layout.buckets)
    for index, change in changes:
        buckets[index] = replace(buckets[index], **change)
    return replace(layout, buckets=tuple(buckets))
