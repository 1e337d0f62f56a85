"""How early weights that travel are fetched, by a layout."""

from __future__ import annotations

from deepstow.strategies.core.layout import Bucket, Layout, ticks_of, uses


def leads(bucket: Bucket, layout: Layout) -> tuple[int, int]:
    """How many ticks before its use a travelling weight is fetched, in forward and backward; 1 where it is there."""
    count, used = layout.num_ticks, uses(bucket, ticks_of(layout.units))
    found: dict[bool, int] = {}  # by whether it is used in backward
    for start, _ in bucket.resident_ticks:
        if start == 0 and bucket.resident_ticks[-1][1] == count:
            continue  # it was fetched before the iteration began
        first = next((tick for tick in (*used, *(tick + count for tick in used)) if tick >= start), start)
        in_backward = first % count >= count // 2
        found[in_backward] = max(found.get(in_backward, 0), first - start)
    return found.get(False, 1), found.get(True, 1)
