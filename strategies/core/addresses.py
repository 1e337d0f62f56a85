"""Where in the arenas everything of a layout lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepstow.strategies.core.facts import Home
from deepstow.strategies.core.layout import Item


@dataclass(frozen=True, slots=True)
class Spot:
    """A range of one home's arena, in bytes."""

    home: Home
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def overlaps(self, other: Spot) -> bool:
        return self.home is other.home and self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Addresses:
    """The size of each home's arena in bytes, and one spot for every need of every bucket.

    ``spots`` is keyed by bucket and item; what belongs to no bucket has the bucket name "". Weights that are never on
    the device together may overlap, and so may spots of one other item that buckets use in turn; nothing else does.
    """

    arena_bytes: Mapping[Home, int]
    spots: Mapping[tuple[str, Item], Spot]

    def of(self, bucket: str, item: Item) -> Spot:
        return self.spots[(bucket, item)]

    def num_bytes(self, home: Home) -> int:
        return self.arena_bytes.get(home, 0)
