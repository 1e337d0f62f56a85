"""``plan.json``: a plan in full, so that another engine can carry it out; its schema; and reading it back.

An engine needs ``keeps`` to ``updates``; the other keys are for people and for later runs. What the fields of a layout
and a keep mean is said in ``strategies/core/layout.py`` and ``plan.py``, and what an item is. Offsets and sizes of
parameters are in elements, those of spots in bytes. Ranges of ticks are half-open; tick i is the forward of unit i, and
2 n - 1 - i its backward.

Invariant. ``problems`` reads a file with the rules of ``strategies/core/validate.py`` and finds nothing exactly if the
engine here could carry it out. ``VERSION`` changes with every key that gets another meaning.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from deepstow.strategies.core.facts import Facts, Tier
from deepstow.strategies.core.layout import Addresses, Item, Layout, Site, Spot, gradient_tick, ticks_of
from deepstow.strategies.core.peak import host_room
from deepstow.strategies.core.plan import Keep, Plan
from deepstow.strategies.core.validate import validate

VERSION = 5


class Entry(BaseModel):
    """Base of all entries: nothing unknown."""

    model_config = ConfigDict(extra="forbid")


class SpotEntry(Entry):
    """A stretch of one tier's arena, in bytes. Buckets whose spots of one item are the same use them in turn."""

    bucket: str = Field(description="empty: of no single bucket, as scratch")
    item: Item
    tier: Tier
    offset: int
    num_bytes: int


class TickEntry(Entry):
    """One tick. ``fetch``: weights that are copied up from here on; ``evict``: that may leave after it; ``gradients``:
    of buckets that are complete after it, for this micro-batch.
    """

    unit: str
    direction: Literal["forward", "backward"]
    fetch: list[str]
    evict: list[str]
    gradients: list[str]


class PlanFile(Entry):
    """A whole ``plan.json``. Nothing is stowed if ``layout`` is null; then there is nothing to carry out."""

    schema_version: Literal[5]
    facts: Facts
    keeps: list[Keep] = Field(description="what each unit keeps for backward")
    layout: Layout | None
    arenas: dict[Tier, int] = Field(description="bytes of each")
    spots: list[SpotEntry]
    ticks: list[TickEntry]
    updates: list[str] = Field(description="buckets in the order of their updates")
    rows: list[dict[str, Any]]
    totals: dict[str, dict[str, int]]
    deepspeed: dict[str, Any]
    idle: dict[str, str]
    recompute: list[dict[str, Any]]
    simulated: dict[str, Any] | None
    measured: list[dict[str, Any]] = Field(
        default=[], description="predicted against measured, in the first steps of a run"
    )

    def addresses(self) -> Addresses:
        spots = {(spot.bucket, spot.item): Spot(spot.tier, spot.offset, spot.num_bytes) for spot in self.spots}
        return Addresses(self.arenas, spots)


def to_json(plan: Plan) -> dict[str, Any]:
    """What an engine needs, as JSON types: the first keys of ``PlanFile``."""
    layout, addresses = plan.layout, plan.addresses
    file: dict[str, Any] = {
        "schema_version": VERSION,
        "facts": plan.facts,
        "keeps": [plan.keep(unit.name) for unit in plan.facts.units],
        "layout": None,
        "arenas": {},
        **{key: [] for key in ("spots", "ticks", "updates")},
    }
    if layout is not None and addresses is not None:
        file |= {"layout": layout, "arenas": addresses.arena_bytes, "ticks": ticks(layout), "updates": updates(layout)}
        file["spots"] = [
            SpotEntry(bucket=name, item=item, tier=spot.tier, offset=spot.offset, num_bytes=spot.num_bytes)
            for (name, item), spot in addresses.spots.items()
        ]
    as_json: dict[str, Any] = to_jsonable_python(file)
    return as_json


def ticks(layout: Layout) -> list[TickEntry]:
    """What happens at each tick of an iteration."""
    count, at = layout.num_ticks, ticks_of(layout.units)
    entries = [TickEntry(unit=unit, direction="forward", fetch=[], evict=[], gradients=[]) for unit in layout.units]
    entries += [entry.model_copy(update={"direction": "backward"}, deep=True) for entry in reversed(entries)]
    for bucket in layout.buckets:
        ranges = bucket.resident_ticks
        over_the_end = bool(ranges) and ranges[0][0] == 0 and ranges[-1][1] == count
        for start, end in ranges:
            if start or not over_the_end:
                entries[start].fetch.append(bucket.name)
            if end < count or not over_the_end:
                entries[end - 1].evict.append(bucket.name)
        if bucket.site is not Site.NONE:
            entries[gradient_tick(bucket, at)].gradients.append(bucket.name)
    return entries


def updates(layout: Layout) -> list[str]:
    """Trained buckets in the order of their updates: as gradients land, or in forward order after the norm is known."""
    if layout.in_backward:
        return [name for tick in ticks(layout) for name in tick.gradients]
    return [bucket.name for bucket in layout.buckets if bucket.site is not Site.NONE]


def problems(text: str) -> list[str]:
    """Everything that is wrong with the content of a ``plan.json``; empty if it can be carried out."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [f"not JSON: {error}"]
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != VERSION:
        return [f"schema_version = {version!r}: this release reads {VERSION}; write the plan anew from its config"]
    try:
        file = PlanFile.model_validate(content)
    except ValidationError as error:
        return [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    if (layout := file.layout) is None:
        return []
    addresses = file.addresses()
    if len(addresses.spots) < len(file.spots):
        return ["spots: two are of one bucket and item"]
    hosted = sum(host_room(keep.hosted_bytes, len(keep.hosted)) for keep in file.keeps)
    broken = validate(layout, addresses, file.facts.params, hosted)
    if broken:
        return broken  # what follows from a broken layout is unknown
    follows = {"ticks": ticks(layout), "updates": updates(layout)}
    return [
        f"{name}: do not follow from the buckets" for name, value in follows.items() if getattr(file, name) != value
    ]
