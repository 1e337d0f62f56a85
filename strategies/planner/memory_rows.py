"""Memory rows: the bytes of a layout per unit and kind of tensor, as the plan's table shows them.

The rest of an arena (slots, scratch, padding) belongs to no unit and is listed by name, so that the table adds up to
the arenas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deepstow.strategies.core.facts import Facts, Tier, Unit
from deepstow.strategies.core.formats import FORMATS
from deepstow.strategies.core.layout import (
    ITEM_BYTES,
    Addresses,
    Bucket,
    Item,
    Layout,
    Site,
    aligned,
    common_needs,
    parks_in_copy,
)
from deepstow.strategies.core.plan import RUN, Kind, Plan, Reserve, Share
from deepstow.strategies.planner.addresses import all_needs, slot_pools, weight_packing

SHARED: Mapping[Item, tuple[str, str]] = {  # what belongs to no unit: its name and the reason
    Item.WEIGHT: ("slots for weights", "weights in flight"),
    Item.GRAD: ("slots for gradients", "gradients going down, or to their owners"),
    Item.ARRIVAL: ("slots for arrivals", "gradients arriving"),
    Item.COPY: ("slots for copies of weights", "weights on their way up from the disk"),
    Item.VISIT: ("slots for state", "state passing through the device"),
    Item.STEPS: ("counts", "one update count per parameter"),
    Item.SCRATCH: ("scratch", "gradients in fp32, a stretch at a time"),
    Item.PARKED: ("waiting gradients", "gradients for the CPU's update"),
    Item.RECEIVED: ("received gradients", "one bucket's, from all ranks, to be added"),
    Item.SCALES: ("scales of moments", "one per block of them"),
    Item.CODES: ("encoded weights", "of one bucket, on its way up; where they rest, their scales"),
    Item.EXPANDED: ("expanded moments", "those that are updated, in fp32, and noise to round them"),
    Item.WINDOW: ("slots for state from the disk", "state that is read, updated or written"),
}
FIRST = (Item.SCRATCH, Item.WEIGHT, Item.RECEIVED, Item.EXPANDED, Item.WINDOW, Item.CODES)  # of them, in the table
UPDATES: Mapping[Site, str] = {
    Site.NONE: "frozen",
    Site.DEVICE: "updated on the device",
    Site.HOST: "updated by the CPU",
    Site.STREAMED: "updated on the device, state visits",
}


@dataclass(frozen=True, slots=True)
class Resting:
    """Where a bucket's tensor of one kind rests, in how many bits per element, and why; of ``shards`` ranks each has a
    span.
    """

    tier: Tier
    bits: int
    reason: str
    shards: int = 1

    def num_bytes(self, elements: int) -> int:
        return -(-(-(-elements // self.shards) * self.bits) // 8)


def resting(bucket: Bucket, layout: Layout, kind: Kind) -> Resting:
    """One kind of tensor of a bucket; 0 bits if there is none."""
    size, shards = 8 * ITEM_BYTES[bucket.dtype], bucket.shards
    if kind is Kind.PARAM:
        if bucket.resident:
            rounded = f", rounded to {bucket.frozen_as}: not exact" if bucket.frozen_as else ""
            return Resting(Tier.DEVICE, size, "always present" + rounded)
        if bucket.weight_on_disk:
            return Resting(Tier.HOST, 0, "on the disk, read for use", shards)
        if bucket.frozen_as:
            return Resting(
                Tier.HOST, FORMATS[bucket.frozen_as].bits, f"fetched for use, in {bucket.frozen_as}: not exact"
            )
        parks = parks_in_copy(bucket, layout)
        reason = "fetched for use; the gradient takes its place" if parks else "fetched for use"
        return Resting(Tier.HOST, size, reason, shards)
    if bucket.site is Site.NONE:
        return Resting(Tier.DEVICE, 0, UPDATES[Site.NONE])
    if kind is Kind.GRAD:
        if bucket.grad_tier is Tier.HOST and parks_in_copy(bucket, layout):
            return Resting(Tier.HOST, 0, "in the place of its weight", shards)
        if bucket.grad_tier is Tier.HOST and bucket.grad_taken:
            return Resting(Tier.HOST, 0, "taken by the update when made")
        if bucket.grad_tier is Tier.HOST:
            return Resting(Tier.HOST, size, "sent down when made", shards)
        if bucket.grad_split:
            return Resting(Tier.DEVICE, size, "each rank's span waits for the update", shards)
        return Resting(Tier.DEVICE, size, "wait for the update where they are made")
    tier = Tier.DEVICE if bucket.site is Site.DEVICE else Tier.HOST
    own_master = bucket.mixed or (bucket.site is Site.HOST and bucket.resident)
    numbers = layout.moments if kind is Kind.MOMENT else int(own_master)
    if bucket.on_disk and (kind is Kind.MOMENT or bucket.mixed):
        return Resting(tier, 0, "on the disk, visits the host for the CPU's update", shards)
    bits, reason = 32, UPDATES[bucket.site]
    if kind is Kind.MASTER and bucket.rounds:
        bits = size
    if kind is Kind.MOMENT and layout.moments_as != "fp32":
        bits, reason = FORMATS[layout.moments_as].bits, f"{reason}, in {layout.moments_as}: not exact"
    return Resting(tier, bits * numbers, reason, shards)


def of_units(facts: Facts, layout: Layout) -> Iterator[Share]:
    """What each unit holds, and where."""
    buckets = {name: bucket for bucket in layout.buckets for name in bucket.params}
    for unit in facts.units:
        elements = [(buckets[param.name], param.num_elements) for param in facts.params if param.unit == unit.name]
        for kind in Kind:
            counted = elements if kind is Kind.PARAM else [(b, n) for b, n in elements if b.group is not None]
            yield _share(unit, kind, [(resting(bucket, layout, kind), n) for bucket, n in counted])


def _share(unit: Unit, kind: Kind, parts: Iterable[tuple[Resting, int]]) -> Share:
    elements = Counter[Resting]()
    for tensor, number in parts:
        elements[tensor] += number
    placed = dict.fromkeys(Tier, 0)
    reasons: dict[Tier, str] = {}
    for tensor, number in sorted(elements.items(), key=lambda item: (-item[0].num_bytes(item[1]), -item[1])):
        placed[tensor.tier] += tensor.num_bytes(number)
        reasons.setdefault(tensor.tier, tensor.reason)
    tier, other_tier = sorted(Tier, key=lambda at: (-placed[at], at not in reasons))
    main = reasons.get(tier, UPDATES[Site.NONE])
    return Share(
        unit=unit.name,
        reason=main,
        kind=kind,
        shards=max((tensor.shards for tensor in elements), default=1),
        tier=tier,
        placed=(placed[Tier.DEVICE], placed[Tier.HOST]),
        stray_reason=reasons.get(other_tier, main),
    )


def reserves(plan: Plan, layout: Layout, addresses: Addresses) -> Iterator[Reserve]:
    """The bytes that belong to no unit: with the units' tensors they add up exactly to the arenas."""
    for tier in Tier:
        named = [(*SHARED[item], size) for item, size in _shared_bytes(layout, tier).items()]
        hosted = plan.facts.run.layerwise * sum(plan.keep(unit.name).hosted_bytes for unit in plan.facts.units)
        saved = hosted if tier is Tier.HOST else 0
        if saved:
            named.append(("alignment of saved tensors", "room between saved tensors", plan.hosted_bytes() - saved))
        gaps = addresses.num_bytes(tier) - plan.states(tier) - saved - sum(size for *_, size in named)
        assert gaps >= 0, f"{tier.value}: the tensors are larger than the arena by {-gaps} bytes"
        named.append(("alignment", "room between parameters", gaps))
        for name, reason, size in named:
            if size:
                yield Reserve(unit=RUN, reason=reason, owner=f"{tier.value}: {name}", num_bytes=size, tier=tier)


def _shared_bytes(layout: Layout, tier: Tier) -> dict[Item, int]:
    """Bytes of slots, scratch, update counts, and gradients that wait for the CPU's update."""
    totals = Counter[Item](dict.fromkeys(FIRST, 0))
    for need in common_needs(layout):
        if need.tier is tier:
            totals[need.item] = aligned(need.num_bytes, tier)
    if tier is Tier.DEVICE:
        totals[Item.WEIGHT] = weight_packing(layout).arena
    else:
        encoded = [bucket for bucket in layout.buckets if bucket.frozen_as and not bucket.resident]
        totals[Item.CODES] = sum(b.copy_bytes - FORMATS[b.frozen_as].code_bytes(b.num_elements) for b in encoded)
    for pool in slot_pools(layout):
        if pool.tier is tier:
            totals[pool.item] += pool.num_bytes
    passing = {bucket.name for bucket in layout.buckets if bucket.grad_passes}
    for need in all_needs(layout):
        is_grad = need.item is Item.PARKED and (need.passes or need.bucket in passing)  # counted as slots or the unit's
        if need.tier is tier and need.item in (Item.STEPS, Item.PARKED, Item.SCALES) and not is_grad:
            totals[need.item] += aligned(need.num_bytes, tier)
    return totals
