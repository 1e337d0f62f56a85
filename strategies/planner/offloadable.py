"""Which buckets' weights may be offloaded, and whose gradients may be sent to the host as they are made.

Excluded are weights of small buckets, because a copy costs its latency and saves nothing; buckets that more than half
of the blocks use, because they would come back for every block; parameters of a module that contains the blocks, which
is in use as long as they are; and parameters that are read outside of the modules that own them, at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strategies.core.facts import Facts, UnitKind
from strategies.core.layout import Bucket
from strategies.planner.buckets import block_bytes

SMALL = 8  # a bucket of less than this part of a block, per unit, is not worth a copy


@dataclass(slots=True)
class Offloadable:
    """Indices of buckets.

    Args:
        blocks: large enough, and used by a few blocks only.
        ends: large buckets of embedding and head that nothing uses while blocks run.
        gradients: large, and complete within a few blocks. Other gradients are few and land all through backward; they
            would hold a slot all the time. Over ranks a slot is held until all ranks have exchanged what is in it, so
            it has to be the gradient of a weight that is not used for long.
    """

    blocks: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


def offloadable(facts: Facts, buckets: Sequence[Bucket], bucket_bytes: int | None) -> Offloadable:
    """Which of ``buckets`` may leave the device."""
    blocks = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
    elsewhere = {param.name for param in facts.params if param.elsewhere}
    stacks = {name.rpartition(".")[0] for name in blocks}
    largest = block_bytes(facts)
    worth = min(largest, bucket_bytes or largest) / SMALL
    found = Offloadable()
    for index, bucket in enumerate(buckets):
        count = len(bucket.units)
        if bucket.weight_bytes / count < worth:
            continue
        by_few_blocks = blocks.issuperset(bucket.units) and 2 * count <= len(blocks)
        if by_few_blocks or count == 1:
            found.gradients.append(index)
        if not elsewhere.isdisjoint(bucket.params):
            continue
        if by_few_blocks:
            found.blocks.append(index)
        # With several stacks of blocks the "head" holds what stands between them, and is not used at the end only.
        elif blocks.isdisjoint(bucket.units) and len(stacks) == 1 and not _is_around(bucket, next(iter(stacks))):
            found.ends.append(index)
    if facts.run.replicas > 1:
        found.gradients = sorted(found.blocks + found.ends)
    return found


def _is_around(bucket: Bucket, stack: str) -> bool:
    """Whether a module that owns one of the parameters contains the blocks, so that it is in use while they are."""
    owners = [param.rpartition(".")[0] for param in bucket.params]
    return any(not owner or f"{stack}.".startswith(f"{owner}.") for owner in owners)
