"""Where in the files of the disk tier the state of each bucket, and its weight, is, and the size of those files.

State rests there in pieces, of ``window_elements`` of a bucket's span and one of what is left: its masters, if it has
any, then one moment after the other. Pieces pass the slots of the window in turn. Each drive has a part of each piece.

A weight that travels rests whole in a file of weights on one drive, so that it can be mapped: of several drives on the
one that has the fewest bytes. It is read into a slot of COPY, and if it is trained, its update writes it from PARKED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import normpath

from deepstow.strategies.core.facts import Rates, Tier
from deepstow.strategies.core.layout import Bucket, Layout, aligned


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A kind of place beyond the host's memory; its class is in ``strategies/engine/memory/tiers.py``.

    Args:
        where: what tables and reports call it.
        holds_weights: weights may rest there, since its bytes can be mapped.
        wears: each byte that is written there wears a drive.
        bytes_per_s: that each of them reads and writes for one rank, as long as it was not measured; None: as drives.
    """

    where: str
    holds_weights: bool = True
    wears: bool = False
    bytes_per_s: tuple[float, float] | None = None


# By the scheme of what ``strategies.offload.disk`` names: ``tcp`` of tcp://host:port; a folder has none.
STORES: Mapping[str, StoreKind] = {"": StoreKind("on the disk", wears=True)}


def scheme_of(place: str) -> str:
    """The kind of a place, a key of ``STORES`` if it is known."""
    scheme, separator, _ = place.partition("://")
    return scheme if separator else ""


def folder_of(place: str) -> str:
    """The folder of a place, if it is one."""
    return place.partition("://")[2] if scheme_of(place) else place


def wear(places: Iterable[str]) -> bool:
    """Whether all of these are on drives, which writing wears."""
    return all(STORES[scheme_of(place)].wears for place in places)


def hold_weights(places: Iterable[str]) -> bool:
    """Whether weights may rest in all of these."""
    return all(STORES[scheme_of(place)].holds_weights for place in places)


def where(places: Iterable[str]) -> str:
    """What a report says of them: ``on the disk``."""
    return " and ".join(dict.fromkeys(STORES[scheme_of(place)].where for place in places))


def bytes_per_s(rates: Rates, places: Sequence[str]) -> tuple[float, float]:
    """What these places together read and write per second, as they were measured, or by their kinds."""
    drive = rates.disk_read_bytes_per_s, rates.disk_write_bytes_per_s
    if rates.disk_folder == ", ".join(places):
        speeds = [drive] * len(places)
    else:
        speeds = [STORES[scheme_of(place)].bytes_per_s or drive for place in places]
    # Each has an equal part of what is moved, so the slowest decides.
    slowest = min((read for read, _ in speeds), default=drive[0]), min((write for _, write in speeds), default=drive[1])
    return max(1, len(speeds)) * slowest[0], max(1, len(speeds)) * slowest[1]


@dataclass(frozen=True, slots=True)
class Piece:
    """State of elements ``start`` to ``stop`` of one rank's span of a bucket, from ``offset`` on in each file."""

    start: int
    stop: int
    slot: int
    offset: int


def part_bytes(num_bytes: int, drives: int) -> int:
    """What each of so many drives has of state of ``num_bytes``; the last one may have less."""
    return aligned(-(-num_bytes // drives), Tier.HOST)


def pieces_on_disk(layout: Layout) -> Iterator[tuple[int, Piece]]:
    """Every piece, with the index of its bucket, in the order of the files."""
    number = end = 0
    for index, bucket in enumerate(layout.buckets):
        for start in range(0, bucket.share if bucket.state_on_disk else 0, layout.window_elements):
            stop = min(start + layout.window_elements, bucket.share)
            yield index, Piece(start, stop, number % layout.window_slots, end)
            number += 1
            end += part_bytes(4 * (layout.moments + bucket.mixed) * (stop - start), len(layout.disk))


def weights_on_disk(layout: Layout) -> dict[int, tuple[int, int]]:
    """The drive of each weight that rests there, by the index of its bucket, and its offset in the file."""
    locations, ends = dict[int, tuple[int, int]](), [0] * len(layout.disk)
    for index, bucket in enumerate(layout.buckets):
        if bucket.weight_on_disk and not bucket.resident:
            drive = ends.index(min(ends))
            locations[index] = drive, ends[drive]
            ends[drive] += weight_bytes_on_disk(bucket)
    return locations


def weight_bytes_on_disk(bucket: Bucket) -> int:
    """What the file of weights has of ``bucket``, if its weight is there."""
    return aligned(bucket.weight_bytes // bucket.shards, Tier.HOST)


def bytes_on_disk(bucket: Bucket, layout: Layout) -> int:
    """What the files have of ``bucket``, if its state, or its frozen weight, is on the disk."""
    if bucket.group is None:
        return weight_bytes_on_disk(bucket)
    numbers, drives = 4 * (layout.moments + bucket.mixed), len(layout.disk)
    full, tail = divmod(bucket.share, layout.window_elements)
    return drives * (full * part_bytes(numbers * layout.window_elements, drives) + part_bytes(numbers * tail, drives))


def read_bytes(bucket: Bucket) -> int:
    """What one rank reads of a weight on the disk, each time that it is fetched; 0: it is not there."""
    return bucket.weight_on_disk * (bucket.weight_bytes // bucket.shards)


def rewritten_bytes(bucket: Bucket) -> int:
    """What one rank writes of a weight on the disk in each update; 0: it is not there."""
    return read_bytes(bucket) if bucket.group is not None and not bucket.resident else 0


def state_file_bytes(layout: Layout) -> int:
    """The size of each file of state."""
    total = sum(bytes_on_disk(bucket, layout) for bucket in layout.buckets if bucket.state_on_disk)
    return total // max(1, len(layout.disk))


def weight_file_bytes(layout: Layout) -> int:
    """The size of each file of weights."""
    places = weights_on_disk(layout).items()
    return max((start + weight_bytes_on_disk(layout.buckets[index]) for index, (_, start) in places), default=0)


def file_bytes(layout: Layout) -> int:
    """The size of both files of a drive."""
    return state_file_bytes(layout) + weight_file_bytes(layout)


def disk_bytes(layout: Layout) -> int:
    """The size of all files of one rank."""
    return len(layout.disk) * file_bytes(layout)


def folders_of(value: str | list[str] | None) -> tuple[str, ...]:
    """What ``strategies.offload.disk`` names; folders as they are written in short."""
    places = (value,) if isinstance(value, str) else tuple(value or ())
    return tuple(place if not place or scheme_of(place) else normpath(place) for place in places)


def check_folders(value: str | list[str]) -> str | list[str]:
    """``value`` of that option. Raise ValueError unless it is a folder for each drive."""
    folders = folders_of(value)
    if not (folders and all(folders)):
        raise ValueError("must be a folder, or a list of folders")
    if unknown := [folder for folder in folders if scheme_of(folder) not in STORES]:
        schemes = "".join(f", or a place of {scheme}://" for scheme in STORES if scheme)
        raise ValueError(f"names {unknown[0]}, and there is no tier {scheme_of(unknown[0])}://; name a folder{schemes}")
    counted = Counter(folder if scheme_of(folder) else normpath(folder) for folder in folders)
    if twice := [folder for folder, times in counted.items() if times > 1]:
        raise ValueError(f"names {twice[0]} twice; write a folder of each drive once")
    return value
