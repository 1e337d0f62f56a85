"""``plan.json``: a plan in full, so that another engine can carry it out; its schema; and reading it back.

An engine needs ``parameters`` to ``updates``, and of ``units`` what each keeps for backward; the other keys are for
people and for later runs. Offsets and sizes of parameters are in elements, all else in bytes. Ranges of ticks are
half-open; tick i is the forward of unit i, and 2 n - 1 - i its backward.

Invariant. ``problems`` reads a file with the rules of ``strategies/core/validate.py`` and finds nothing exactly if the
engine here could carry it out. ``VERSION`` changes with every key that gets another meaning.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_jsonable_python

from strategies.core.facts import Facts, Home, Unit, UnitKind
from strategies.core.layout import Addresses, Bucket, Item, Layout, Range, Site, Spot, gradient_tick, ticks_of
from strategies.core.peak import host_room
from strategies.core.plan import Plan
from strategies.core.validate import validate

VERSION = 1


class Entry(BaseModel):
    """Base of all entries: nothing unknown."""

    model_config = ConfigDict(extra="forbid")


class SpotEntry(Entry):
    """A stretch of one home's arena, in bytes."""

    home: Home
    offset: int
    bytes: int

    @classmethod
    def of(cls, spot: Spot) -> SpotEntry:
        return cls(home=spot.home, offset=spot.offset, bytes=spot.num_bytes)


class ParameterEntry(Entry):
    """One parameter: ``elements`` of its bucket's dtype from element ``offset`` of the bucket."""

    name: str
    bucket: str
    offset: int
    elements: int
    dtype: str
    group: int | None = Field(description="of the optimizer; null: frozen")


class BucketEntry(Entry):
    """One bucket. ``stays``: when its weight is on the device, as ranges of ticks; empty: always.

    Where a gradient goes to the host and ``addresses`` have no parked gradient, its place is that of the weight's copy:
    see ``parks_in_copy`` in ``strategies/core/layout.py``.
    """

    name: str
    units: tuple[str, ...]
    num_params: int
    elements: int = Field(description="with padding")
    bytes: int = Field(description="of its weight in the dtype of compute")
    dtype: str
    group: int | None
    site: Site
    gradients: Home = Field(description="where they wait for the norm and for further micro-batches")
    ways: int = Field(1, description="ranks that hold a span of it each")
    splits_gradients: bool = Field(False, description="of those that wait on the device each rank keeps its span alone")
    direct_gradients: bool = Field(False, description="they go down from where backward made them; no slot")
    looked_up: bool = Field(False, description="its first unit does not read it in backward, as an embedding")
    stays: tuple[Range, ...]
    addresses: dict[Item, SpotEntry]


class SlotEntry(Entry):
    """Memory that buckets use in turn, in the order of ``buckets``."""

    item: Item
    home: Home
    offset: int
    bytes: int
    buckets: list[str]


class UnitEntry(Entry):
    """What a unit keeps for backward: on the device, and of that ``hosted`` on the host until then."""

    name: str
    kind: UnitKind
    policy: str = Field(description="none: all that autograd saves; otherwise backward runs the unit again")
    kept: tuple[str, ...]
    saved_bytes: int
    hosted: tuple[str, ...]
    hosted_bytes: int


class TickEntry(Entry):
    """One tick. ``fetch``: weights that are copied up from here on; ``evict``: that may leave after it; ``gradients``:
    of buckets that are complete after it, for this micro-batch.
    """

    unit: str
    direction: Literal["forward", "backward"]
    fetch: list[str]
    evict: list[str]
    gradients: list[str]


_SETTINGS: dict[str, Any] = {name: (kind, ...) for name, kind in get_type_hints(Layout).items() if name != "buckets"}
LayoutEntry: Any = create_model("LayoutEntry", __base__=Entry, **_SETTINGS)
# Which field of ``Bucket`` is what in a ``BucketEntry``.
FIELDS = {name: name for name in ("name", "units", "dtype", "group", "site", "ways", "looked_up")}
FIELDS |= {"elements": "num_elements", "gradients": "grad_home", "stays": "resident_ticks"}
FIELDS |= {"splits_gradients": "grad_split", "direct_gradients": "grad_direct"}


class PlanFile(Entry):
    """A whole ``plan.json``. Nothing is stowed if ``layout`` is null; then there is nothing to carry out."""

    schema_version: Literal[1]
    facts: Facts
    units: list[UnitEntry]
    parameters: list[ParameterEntry]
    buckets: list[BucketEntry]
    layout: LayoutEntry | None
    arenas: dict[Home, int]
    slots: list[SlotEntry]
    shared: dict[Item, SpotEntry]  # of no bucket: scratch, room for saved tensors
    ticks: list[TickEntry]
    updates: list[str] = Field(description="buckets in the order of their updates")
    rows: list[dict[str, Any]]
    totals: dict[str, dict[str, int]]
    deepspeed: dict[str, Any]
    idle: dict[str, str]
    linears: dict[str, Any]
    recompute: list[dict[str, Any]]
    simulated: dict[str, Any] | None
    measured: list[dict[str, Any]] = Field(
        default=[], description="predicted against measured, in the first steps of a run"
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """What an engine needs, as JSON types: the first keys of ``PlanFile`` without ``facts``."""
    layout, addresses = plan.layout, plan.addresses
    found: dict[str, Any] = {"schema_version": VERSION, "units": [_unit(plan, unit) for unit in plan.facts.units]}
    if layout is not None and addresses is not None:
        found |= _stowed(layout, addresses)
    else:
        found |= {key: [] for key in ("parameters", "buckets", "slots", "ticks", "updates")}
        found |= {"layout": None, "arenas": {}, "shared": {}}
    made: dict[str, Any] = to_jsonable_python(found)
    return made


def _stowed(layout: Layout, addresses: Addresses) -> dict[str, Any]:
    return {
        "parameters": [
            ParameterEntry(name=name, bucket=b.name, offset=offset, elements=size, dtype=b.dtype, group=b.group)
            for b in layout.buckets
            for name, offset, size in zip(b.params, b.offsets, b.sizes, strict=True)
        ],
        "buckets": [_entry(bucket, addresses) for bucket in layout.buckets],
        "slots": slots(addresses),
        "ticks": ticks(layout),
        "updates": updates(layout),
        "layout": {name: getattr(layout, name) for name in _SETTINGS},
        "arenas": {home: addresses.num_bytes(home) for home in Home},
        "shared": {item: SpotEntry.of(spot) for (name, item), spot in addresses.spots.items() if not name},
    }


def _unit(plan: Plan, unit: Unit) -> UnitEntry:
    keep = plan.keep(unit.name)
    names = UnitEntry.model_fields.keys() - {"name", "kind"}
    return UnitEntry(name=unit.name, kind=unit.kind, **{name: getattr(keep, name) for name in names})


def _entry(bucket: Bucket, addresses: Addresses) -> BucketEntry:
    spots = {item: addresses.spots.get((bucket.name, item)) for item in Item}
    return BucketEntry(
        num_params=len(bucket.params),
        bytes=bucket.weight_bytes,
        addresses={item: SpotEntry.of(spot) for item, spot in spots.items() if spot is not None},
        **{key: getattr(bucket, name) for key, name in FIELDS.items()},
    )


def slots(addresses: Addresses) -> list[SlotEntry]:
    """Stretches that several buckets use for one kind of item. Weights, which share by time, are not among them."""
    users: dict[tuple[Item, Home, int], dict[str, int]] = {}
    for (name, item), spot in addresses.spots.items():
        if name and item is not Item.WEIGHT:
            users.setdefault((item, spot.home, spot.offset), {})[name] = spot.num_bytes
    return [
        SlotEntry(item=item, home=home, offset=offset, bytes=max(some.values()), buckets=list(some))
        for (item, home, offset), some in sorted(users.items(), key=lambda it: (it[0][0].value, it[0][2]))
        if len(some) > 1
    ]


def ticks(layout: Layout) -> list[TickEntry]:
    """What happens at each tick of an iteration."""
    count, at = layout.num_ticks, ticks_of(layout.units)
    found = [TickEntry(unit=unit, direction="forward", fetch=[], evict=[], gradients=[]) for unit in layout.units]
    found += [each.model_copy(update={"direction": "backward"}, deep=True) for each in reversed(found)]
    for bucket in layout.buckets:
        ranges = bucket.resident_ticks
        over_the_end = bool(ranges) and ranges[0][0] == 0 and ranges[-1][1] == count
        for start, end in ranges:
            if start or not over_the_end:
                found[start].fetch.append(bucket.name)
            if end < count or not over_the_end:
                found[end - 1].evict.append(bucket.name)
        if bucket.site is not Site.NONE:
            found[gradient_tick(bucket, at)].gradients.append(bucket.name)
    return found


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
        return [f"schema_version = {version!r}: this reads {VERSION}"]
    try:
        file = PlanFile.model_validate(content)
    except ValidationError as error:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    if file.layout is None:
        return []
    layout, addresses = read(file)
    hosted = sum(host_room(unit.hosted_bytes, len(unit.hosted)) for unit in file.units)
    found = validate(layout, addresses, file.facts.params, hosted)
    return found or [*_derived(file, layout, addresses)]


def read(file: PlanFile) -> tuple[Layout, Addresses]:
    """The layout and its addresses. Parameters of a bucket that is not there are left out: they are in no bucket."""
    of_bucket: dict[str, list[ParameterEntry]] = {}
    for param in file.parameters:
        of_bucket.setdefault(param.bucket, []).append(param)
    buckets = (_bucket(entry, of_bucket.get(entry.name, [])) for entry in file.buckets)
    spots = {(each.name, item): spot for each in file.buckets for item, spot in each.addresses.items()}
    spots |= {("", item): spot for item, spot in file.shared.items()}
    layout = Layout(buckets=tuple(buckets), **{name: getattr(file.layout, name) for name in _SETTINGS})
    places = {key: Spot(spot.home, spot.offset, spot.bytes) for key, spot in spots.items()}
    return layout, Addresses(file.arenas, places)


def _bucket(entry: BucketEntry, params: list[ParameterEntry]) -> Bucket:
    return Bucket(
        params=tuple(param.name for param in params),
        sizes=tuple(param.elements for param in params),
        offsets=tuple(param.offset for param in params),
        **{name: getattr(entry, key) for key, name in FIELDS.items()},
    )


def _derived(file: PlanFile, layout: Layout, addresses: Addresses) -> list[str]:
    """Parts that follow from others and differ from them."""
    buckets = {bucket.name: bucket for bucket in layout.buckets}
    found = [
        f"parameter {param.name}: another dtype or group than its bucket"
        for param in file.parameters
        if (bucket := buckets.get(param.bucket)) is None or (param.dtype, param.group) != (bucket.dtype, bucket.group)
    ]
    found += [
        f"bucket {entry.name}: bytes or num_params do not follow from its parameters"
        for entry in file.buckets
        if (entry.bytes, entry.num_params) != (buckets[entry.name].weight_bytes, len(buckets[entry.name].params))
    ]
    same = {
        "ticks": file.ticks == ticks(layout),
        "updates": file.updates == updates(layout),
        "slots": file.slots == slots(addresses),
    }
    return found + [f"{name}: do not follow from the buckets" for name, is_same in same.items() if not is_same]
