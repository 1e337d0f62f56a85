"""The stowage table: which buckets are updated where, when their weights travel, and at what address they lie.

Buckets of one kind share a row, wherever they stand: with updates shared between the CPU and the link, every other one
is of the same kind. ``to_json`` lists each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from strategies.core.facts import Home
from strategies.core.layout import Addresses, Bucket, Item, Layout, Site, leads
from strategies.core.plan import Plan
from strategies.report.plan_table import human

HEADER = ("buckets", "bytes", "updated", "gradients wait", "weights", "address on the device")
SITES = {
    Site.NONE: "never (frozen)",
    Site.DEVICE: "on the device",
    Site.HOST: "by the CPU",
    Site.STREAMED: "on the device, state visits",
}
Kind: TypeAlias = tuple[Site, Home, bool, int]


def lines(plan: Plan) -> Iterator[str]:
    """The table as text; nothing, where nothing is stowed."""
    layout, addresses = plan.layout, plan.addresses
    if layout is None or addresses is None:
        return
    groups: dict[Kind, list[Bucket]] = {}
    for bucket in layout.buckets:
        groups.setdefault((bucket.site, bucket.grad_home, bucket.resident, _kind(bucket, plan)), []).append(bucket)
    cells = [HEADER, *(_cells(some, layout, addresses) for some in groups.values())]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    yield made[0]
    yield "-" * max(map(len, made))
    yield from made[1:]


def _kind(bucket: Bucket, plan: Plan) -> int:
    """Embedding, blocks and head each have rows of their own; what several use is of the first."""
    kinds = [unit.kind for unit in plan.facts.units if unit.name == bucket.units[0]]
    return list(type(kinds[0])).index(kinds[0])


def _cells(some: Sequence[Bucket], layout: Layout, addresses: Addresses) -> tuple[str, ...]:
    first, last = some[0], some[-1]
    name = first.name if len(some) == 1 else f"{first.name} to {last.name} ({len(some)})"
    spots = [addresses.of(bucket.name, Item.WEIGHT) for bucket in some]
    where = f"{human(min(s.offset for s in spots))} to {human(max(s.end for s in spots))}"
    waits = "" if first.site is Site.NONE else f"on the {first.grad_home.value}"
    total = human(sum(bucket.weight_bytes for bucket in some))
    return (name, total, SITES[first.site], waits, _travels(some, layout), where)


def _travels(some: Sequence[Bucket], layout: Layout) -> str:
    if some[0].resident:
        return "stay"
    forward, backward = zip(*(leads(bucket, layout) for bucket in some), strict=True)
    return f"come {_span(forward)} steps ahead in forward, {_span(backward)} in backward"


def _span(numbers: Iterable[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def to_json(plan: Plan) -> list[dict[str, Any]]:
    """Each bucket: what it holds, where it lies, when it is on the device (half-open ranges of steps)."""
    layout, addresses = plan.layout, plan.addresses
    if layout is None or addresses is None:
        return []
    return [
        {
            "name": bucket.name,
            "units": list(bucket.units),
            "num_params": len(bucket.params),
            "bytes": bucket.weight_bytes,
            "site": bucket.site.value,
            "gradients": bucket.grad_home.value,
            "stays": [list(stay) for stay in bucket.resident_ticks],
            "addresses": {
                item.value: {"home": spot.home.value, "offset": spot.offset, "bytes": spot.num_bytes}
                for item in Item
                if (spot := addresses.spots.get((bucket.name, item))) is not None
            },
        }
        for bucket in layout.buckets
    ]
