"""Which buckets may travel, and whose gradients may pass on their way down.

Not worth a copy are weights of buckets that are small: a copy costs its latency and saves nothing. Those that more than
half of the blocks use would come back for every block. A parameter of a module that contains the blocks is in use as
long as they are. One that is read outside of the modules that own it may be read at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.facts import Facts, UnitKind
from strategies.core.layout import Bucket
from strategies.planner.buckets import block_bytes

SMALL = 8  # a bucket of less than this part of a block, per unit, is not worth a copy


class Movable:
    """Whose weights may travel."""

    def __init__(self, facts: Facts, bucket_bytes: int | None) -> None:
        self._kinds = {unit.name: unit.kind for unit in facts.units}
        self._elsewhere = {param.name for param in facts.params if param.elsewhere}
        self._num_blocks = sum(kind is UnitKind.BLOCK for kind in self._kinds.values())
        largest = block_bytes(facts)
        self._worth = min(largest, bucket_bytes or largest) / SMALL
        stacks = {unit.name.rpartition(".")[0] for unit in facts.units if unit.kind is UnitKind.BLOCK}
        # With several stacks of blocks the "head" holds what stands between them, and is not used at the end only.
        self._has_ends = len(stacks) == 1
        self._stack = next(iter(stacks), "")

    def blocks(self, buckets: Sequence[Bucket]) -> list[int]:
        """Indices of buckets that only blocks use, large enough, and used by few."""
        return [
            index
            for index, bucket in enumerate(buckets)
            if self._is_large(bucket) and self._by_few_blocks(bucket) and not self._is_read_elsewhere(bucket)
        ]

    def passing(self, buckets: Sequence[Bucket]) -> list[int]:
        """Indices of buckets whose gradients may go down as they are made: large, and complete within a few blocks.

        The gradients of others are few and land all through backward; they would hold a slot all the time.
        """
        return [
            index
            for index, bucket in enumerate(buckets)
            if self._is_large(bucket) and (len(bucket.units) == 1 or self._by_few_blocks(bucket))
        ]

    def ends(self, buckets: Sequence[Bucket]) -> list[int]:
        """Indices of large buckets of embedding and head that nothing uses while blocks run."""
        if not self._has_ends:
            return []
        return [
            index
            for index, bucket in enumerate(buckets)
            if not any(map(self._is_block, bucket.units))
            and self._is_large(bucket)
            and not any(map(self._is_around_blocks, bucket.params))
            and not self._is_read_elsewhere(bucket)
        ]

    def _is_read_elsewhere(self, bucket: Bucket) -> bool:
        return not self._elsewhere.isdisjoint(bucket.params)

    def _is_around_blocks(self, param: str) -> bool:
        """Whether the module that owns the parameter contains the blocks, so that it is in use while they are."""
        owner = param.rpartition(".")[0]
        return not owner or f"{self._stack}.".startswith(f"{owner}.")

    def _is_block(self, unit: str) -> bool:
        return self._kinds[unit] is UnitKind.BLOCK

    def _is_large(self, bucket: Bucket) -> bool:
        return bucket.weight_bytes / len(bucket.units) >= self._worth

    def _by_few_blocks(self, bucket: Bucket) -> bool:
        return all(map(self._is_block, bucket.units)) and 2 * len(bucket.units) <= self._num_blocks
