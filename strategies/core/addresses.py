"""Where in the arenas everything of a layout lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Item


@dataclass(frozen=True, slots=True)
class Spot:
    """A range of one tier's arena, in bytes."""

    tier: Tier
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def overlaps(self, other: Spot) -> bool:
        return self.tier is other.tier and self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Addresses:
    """The size of each tier's arena in bytes, and one spot for every need of every bucket.

    ``spots`` is keyed by bucket and item; what belongs to no bucket has the bucket name "". Weights that are never on
    the device together may overlap, and so may spots of one other item that buckets use in turn; nothing else does.
    """

    arena_bytes: Mapping[Tier, int]
    spots: Mapping[tuple[str, Item], Spot]

    def of(self, bucket: str, item: Item) -> Spot:
        return self.spots[(bucket, item)]

    def num_bytes(self, tier: Tier) -> int:
        return self.arena_bytes.get(tier, 0)
