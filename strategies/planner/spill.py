"""What rests on the disk for want of memory: as little as possible, so that the host holds the rest, and a copy of
every weight that is not there.

First the state of blocks goes, from the last one on, which the next forward needs last, and frozen weights that may
leave the device. Then the weights of trained blocks, where that frees anything: if a gradient waits in the memory of
the copy, the host still needs that memory. Embedding and head are last, since a piece of theirs may be larger than any
block's, and all slots of the window are as large as the largest piece. Once it is known what travels, ``off_disk``
takes back what the host has room for after all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Bucket, Layout, Site, needs
from deepstow.strategies.core.on_disk import bytes_on_disk, hold_weights, weight_bytes_on_disk
from deepstow.strategies.planner.addresses import held_bytes, place
from deepstow.strategies.planner.places import Place, Placement, Places

Change: TypeAlias = tuple[int, Any]  # the fields of a bucket, by index, that become others
COPY_BACK: Any = {"copy_on_disk": False}  # the trained weight of a bucket leaves the disk
ALL_BACK: Any = {"on_disk": False}  # its state, or its frozen weight, does


def spilled(places: Places, placement: Placement, host_room: float) -> Placement:
    """``placement`` with the fewest moves to the disk that make the host fit; if none do, with those that leave it the
    least. Who asks looks whether the host fits.
    """
    layout, disk_bytes = places.empty, places.request.disk_bytes
    if not layout.disk:
        return placement
    none = tuple(_resting(at, state=False, copy=False) if at.on_disk else at for at in placement)
    may = list[tuple[int, bool]]()
    states = set[int]()
    total = 0
    largest = 0
    for index, copy, size in _moves(places, layout, none):
        largest_after = max(largest, size if copy or none[index].site is Site.NONE else 0)
        # A weight is whole on one drive, which may have so much more than each of the others.
        uneven = (len(layout.disk) - 1) * largest_after
        if size and total + size + uneven <= disk_bytes and (not copy or index in states):
            may.append((index, copy))
            states.add(index)
            total, largest = total + size, largest_after

    def with_some(number: int) -> Placement:
        changed = list(none)
        for index, copy in may[:number]:
            changed[index] = _resting(none[index], state=True, copy=copy)
        return tuple(changed)

    def host(number: int) -> int:
        sizes = places.sizes(with_some(number))
        return sizes.host + sizes.copies

    if not may or host(0) <= host_room:
        return none
    of_blocks = [copy for index, copy in may if index in places.of_blocks]
    # Moves beyond these may make slots larger: all, those of blocks, and blocks' state alone.
    most = min(len(may), len(of_blocks), of_blocks.count(False), key=host)
    return with_some(bisect_left(range(most), True, lo=min(1, most), key=lambda number: host(number) <= host_room))


@cache
def _resting(place: Place, *, state: bool, copy: bool) -> Place:
    """``place`` with its state, or its frozen weight, on the disk (``state``), and its trained weight (``copy``)."""
    return place._replace(on_disk=state, copy_on_disk=copy)


def _moves(places: Places, layout: Layout, none: Placement) -> Iterator[tuple[int, bool, int]]:
    """What may go there, in order: of which bucket, whether the weight of a trained one, and its bytes there."""
    leaving = [index for index, at in enumerate(none) if places.may_leave(index, at)]
    weights = hold_weights(layout.disk)
    frozen = {index for index in leaving if none[index].site is Site.NONE and weights}
    rests = [index for index, at in enumerate(none) if at.site is Site.HOST or index in frozen]
    rests.sort(key=lambda index: (index not in places.of_blocks, index in frozen, -index))
    for index in rests:
        if index in places.of_blocks:
            yield index, False, bytes_on_disk(places.buckets[index], layout)
    for index in reversed(leaving) if weights else ():
        if index in places.of_blocks and none[index].site is Site.HOST:
            alone, both = (places.hosted(index, _resting(none[index], state=True, copy=copy)) for copy in (False, True))
            if both < alone:
                # In fp32 the copy was the master, which the state has beside it then.
                bucket = replace(places.buckets[index], copy_on_disk=True)
                master_bytes = bytes_on_disk(bucket, layout) - bytes_on_disk(places.buckets[index], layout)
                yield index, True, master_bytes + weight_bytes_on_disk(bucket)
    for index in rests:
        if index not in places.of_blocks:
            yield index, False, bytes_on_disk(places.buckets[index], layout)


def off_disk(layout: Layout, host_room: int) -> Layout:
    """``layout``, of which it is known what travels, with as much off the disk as the host has room for, weights
    first.
    """
    on_disk = [index for index, bucket in enumerate(layout.buckets) if bucket.on_disk]
    if not on_disk:
        return layout
    copies = [(index, COPY_BACK) for index in on_disk if layout.buckets[index].copy_on_disk]
    changes = copies + [
        (index, ALL_BACK) for index in sorted(on_disk, key=lambda index: layout.buckets[index].state_on_disk)
    ]
    for group in (changes, copies):  # whole groups first: with none of them there, their slots go, too
        if group and place(smaller := _changed(layout, group)).num_bytes(Tier.HOST) <= host_room:
            layout = smaller
            break
    room, applied = host_room - place(layout).num_bytes(Tier.HOST), list[Change]()
    staying = set[int]()  # whose weight stays there; state has to be where its weight is updated, on the disk
    for index, change in changes:
        bucket = layout.buckets[index] if change is COPY_BACK else replace(layout.buckets[index], copy_on_disk=False)
        size = _held(replace(bucket, **change), layout) - _held(bucket, layout)
        if size > room or index in staying:
            staying.add(index)
        else:
            room, applied = room - size, [*applied, (index, change)]
    return _changed(layout, applied)


def _held(bucket: Bucket, layout: Layout) -> int:
    return held_bytes(needs(bucket, layout), Tier.HOST)


def _changed(layout: Layout, changes: Iterable[Change]) -> Layout:
    buckets = list(layout.buckets)
    for index, change in changes:
        buckets[index] = replace(buckets[index], **change)
    return replace(layout, buckets=tuple(buckets))
