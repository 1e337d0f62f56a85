"""The bucket table: which buckets are updated where, when their weights travel, and their addresses.

Buckets of one kind share a row, wherever they stand; ``plan.json`` lists each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from strategies.core.layout import Addresses, Bucket, Item, Layout, Site, largest_shared, leads, ticks_of, uses
from strategies.core.plan import Plan
from strategies.core.sizes import human
from strategies.planner.exchanges import crosses, leaving, sum_bound
from strategies.planner.memory_rows import UPDATES
from strategies.report.table import table

HEADER = ("buckets", "bytes", "update", "gradients wait", "weights", "address on the device")


def lines(plan: Plan) -> list[str]:
    """The table as text; empty if nothing is stowed."""
    layout, addresses = plan.layout, plan.addresses
    if layout is None or addresses is None:
        return []
    kinds = {unit.name: unit.kind for unit in plan.facts.units}
    groups: dict[tuple[object, ...], list[Bucket]] = {}
    for bucket in layout.buckets:
        # Embedding, blocks and head each have rows of their own; a bucket of several units is of the first one's kind.
        grads = (bucket.grad_home, bucket.grad_split, bucket.grad_direct)
        key = (bucket.site, grads, bucket.resident, kinds[bucket.units[0]])
        groups.setdefault(key, []).append(bucket)
    return [*table(HEADER, (_cells(some, layout, addresses) for some in groups.values())), *_sums(plan, layout)]


def _sums(plan: Plan, layout: Layout) -> Iterator[str]:
    """How ranks add gradients, what that changes in a sum, and its bytes."""
    fast, shared = layout.reduction == "fast", [bucket for bucket in layout.buckets if bucket.ways > 1]
    size = human(largest_shared(layout))
    if not shared:
        if fast:
            yield "reduction: fast has no effect, since no ranks share a gradient"
        return
    ranks, dtype = shared[0].ways, shared[0].dtype
    words = f"exact, in the order of ranks; {size} of the device receive them"
    if fast:
        bound = f"at most {sum_bound(ranks, dtype):.2g} of the sizes of its parts ({dtype})"
        words = f"fast, on their way, which saves {size} of the device; a sum differs from the exact one by "
        words += bound if ranks > 2 else "nothing, since two numbers have one sum"
    if crosses(plan.facts):
        here, other = (leaving(plan.facts, each) for each in (("fast", "exact") if fast else ("exact", "fast")))
        words += f"; {here:.0%} of each go to other machines ({'exact' if fast else 'fast'}: {other:.0%})"
        if plan.facts.machine.rates and not plan.facts.machine.rates.net_across_bytes_per_s:
            words += ", how fast is unknown here: simulated as if all were on one"
    yield f"gradients of {ranks} ranks are added: {words}"


def _cells(some: Sequence[Bucket], layout: Layout, addresses: Addresses) -> tuple[str, ...]:
    first, last = some[0], some[-1]
    name = first.name if len(some) == 1 else f"{first.name} to {last.name} ({len(some)})"
    spots = [addresses.of(bucket.name, Item.WEIGHT) for bucket in some]
    where = f"{human(min(s.offset for s in spots))} to {human(max(s.end for s in spots))}"
    how = ", shared" * first.grad_split + ", without a slot" * first.grad_direct
    waits = "" if first.site is Site.NONE else f"on the {first.grad_home.value}{how}"
    total = human(sum(bucket.weight_bytes for bucket in some))
    return (name, total, UPDATES[first.site], waits, _travels(some, layout), where)


def _travels(some: Sequence[Bucket], layout: Layout) -> str:
    if some[0].resident:
        return "stay"
    forward, backward = zip(*(leads(bucket, layout) for bucket in some), strict=True)
    ticks, turn = ticks_of(layout.units), layout.num_ticks // 2
    if all(uses(bucket, ticks)[-1] < turn for bucket in some):
        return f"come {_span(forward)} ticks ahead in forward"
    return f"come {_span(forward)} ticks ahead in forward, {_span(backward)} in backward"


def _span(numbers: Iterable[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
