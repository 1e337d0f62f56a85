"""Accounts: whose tensors the bytes of a layout are, in the words of the plan's table.

A layout is in buckets, the table in units and kinds of tensor. What a unit's tensors need is the smallest number of
bytes per element that all of them have, at the home where most of them rest; the others are strays. What is left of an
arena (slots, scratch, padding) belongs to no unit and is listed by name, so that the table adds up to the arenas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from strategies.core.facts import Facts, Home, Unit
from strategies.core.layout import ITEM_BYTES, Addresses, Bucket, Item, Layout, Site, aligned, scratch_bytes
from strategies.core.plan import RUN, Kind, Plan, Reserve, Rest, Share
from strategies.planner.addresses import all_needs, in_turns, packed, travelling

PASSING: Mapping[Item, str] = {
    Item.WEIGHT: "weights in flight",
    Item.GRAD: "gradients going down",
    Item.ARRIVAL: "gradients arriving",
    Item.VISIT: "state passing through the device",
}
PERMANENT: Mapping[Item, str] = {
    Item.STEPS: "one update count per parameter",
    Item.SCRATCH: "gradients in fp32, a stretch at a time",
    Item.PARKED: "gradients for the CPU's update",
}
UPDATES = {
    Site.NONE: "frozen",
    Site.DEVICE: "updated on the device",
    Site.HOST: "updated by the CPU",
    Site.STREAMED: "updated on the device, which they visit",
}


@dataclass(frozen=True, slots=True)
class Resting:
    """Where an element of a bucket has its tensor of one kind, in how many bytes, and why."""

    home: Home
    element_bytes: int
    reason: str


def resting(bucket: Bucket, layout: Layout, kind: Kind) -> Resting:
    """One kind of tensor of a bucket; 0 bytes where there is none."""
    size = ITEM_BYTES[bucket.dtype]
    if kind is Kind.PARAM:
        stays = bucket.resident
        return Resting(Home.DEVICE if stays else Home.HOST, size, "always present" if stays else "fetched for use")
    if bucket.site is Site.NONE:
        return Resting(Home.DEVICE, 0, UPDATES[Site.NONE])
    if kind is Kind.GRAD:
        waits = "wait for the update where they are made" if bucket.grad_home is Home.DEVICE else "sent down when made"
        return Resting(bucket.grad_home, size, waits)
    rests = Home.DEVICE if bucket.site is Site.DEVICE else Home.HOST
    own_master = bucket.mixed or (bucket.site is Site.HOST and bucket.resident)
    numbers = layout.moments if kind is Kind.MOMENT else int(own_master)
    return Resting(rests, 4 * numbers, UPDATES[bucket.site])


def of_units(facts: Facts, layout: Layout) -> Iterator[Share | Rest]:
    """What each unit holds, and where."""
    buckets = {name: bucket for bucket in layout.buckets for name in bucket.params}
    for unit in facts.units:
        own = [(buckets[param.name], param.num_elements) for param in facts.params if param.unit == unit.name]
        for kind in Kind:
            counted = own if kind is Kind.PARAM else [(b, n) for b, n in own if b.group is not None]
            yield from _answers(unit, kind, [(resting(bucket, layout, kind), n) for bucket, n in counted])


def _answers(unit: Unit, kind: Kind, parts: list[tuple[Resting, int]]) -> Iterator[Share | Rest]:
    elements = dict.fromkeys(Home, 0)
    reasons: dict[Home, str] = {}
    for part, number in sorted(parts, key=lambda item: -item[1]):
        elements[part.home] += number
        reasons.setdefault(part.home, part.reason)
    element_bytes = min((part.element_bytes for part, _ in parts), default=0)
    home, other = sorted(Home, key=lambda at: -elements[at])
    main = reasons.get(home, UPDATES[Site.NONE])
    yield Share(unit=unit.name, reason=main, kind=kind, ways=1, element_bytes=element_bytes)
    strays = elements[other] if element_bytes else 0
    yield Rest(unit=unit.name, reason=reasons.get(other, main), kind=kind, home=home, strays=strays)


def reserves(plan: Plan, layout: Layout, addresses: Addresses) -> Iterator[Reserve]:
    """What belongs to no unit: with the units' tensors it adds up to the arenas, byte for byte."""
    for home in Home:
        named = dict(_named(layout, home))
        saved = sum(plan.keep(unit.name).hosted_bytes for unit in plan.facts.units) if home is Home.HOST else 0
        named["room between saved tensors"] = plan.hosted_bytes() - saved if saved else 0
        uneven = _uneven(plan, layout, home)
        left = addresses.num_bytes(home) - plan.states(home) - saved - sum(named.values()) - uneven
        assert left >= 0, f"{home.value}: the tensors are larger than the arena by {-left} bytes"
        named |= {"tensors unlike the others of their unit": uneven, "room between parameters": left}
        for reason, size in named.items():
            if size:
                yield Reserve(
                    unit=RUN, reason=reason, owner=f"{home.value}: {_SHORT[reason]}", num_bytes=size, home=home
                )


_SHORT = {
    PASSING[Item.WEIGHT]: "slots for weights",
    PASSING[Item.GRAD]: "slots for gradients",
    PASSING[Item.ARRIVAL]: "slots for arrivals",
    PASSING[Item.VISIT]: "slots for state",
    PERMANENT[Item.STEPS]: "counts",
    PERMANENT[Item.SCRATCH]: "scratch",
    PERMANENT[Item.PARKED]: "parked gradients",
    "tensors unlike the others of their unit": "odd tensors",
    "room between saved tensors": "alignment of saved tensors",
    "room between parameters": "alignment",
}


def _named(layout: Layout, home: Home) -> Iterable[tuple[str, int]]:
    every = all_needs(layout)
    totals = {PERMANENT[Item.SCRATCH]: scratch_bytes(layout) if home is Home.DEVICE else 0}
    if home is Home.DEVICE:
        totals[PASSING[Item.WEIGHT]] = packed(travelling(layout)).arena
    for turns in in_turns(layout):
        if turns.home is home:
            totals[PASSING[turns.item]] = turns.num_bytes
    waits_below = {bucket.name for bucket in layout.buckets if bucket.grad_home is Home.HOST}
    for need in every:
        is_own = need.item is Item.PARKED and need.bucket in waits_below  # where its gradient rests
        if need.home is home and not need.passes and need.item in PERMANENT and not is_own:
            reason = PERMANENT[need.item]
            totals[reason] = totals.get(reason, 0) + aligned(need.num_bytes, home)
    return totals.items()


def _uneven(plan: Plan, layout: Layout, home: Home) -> int:
    """Bytes of parameters' tensors that the units' answers do not count."""
    total = sum(
        resting(bucket, layout, kind).element_bytes * sum(bucket.sizes)
        for bucket in layout.buckets
        for kind in Kind
        if resting(bucket, layout, kind).home is home
    )
    return total - plan.states(home)
