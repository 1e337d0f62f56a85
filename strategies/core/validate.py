"""Validation: checks that a layout can be carried out at given addresses, and lists everything that is wrong with it.

A wrong address or a weight that is away when it is used would train with wrong numbers, without an error. Written from
the contract in ``strategies/core/layout.py`` and nothing else, so that it can check any planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from deepstow.strategies.core.facts import Param, Tier
from deepstow.strategies.core.formats import FORMATS
from deepstow.strategies.core.layout import (
    ALIGN_BYTES,
    ITEM_BYTES,
    Addresses,
    Bucket,
    Item,
    Layout,
    Need,
    Site,
    Spot,
    aligned,
    common_bytes,
    common_needs,
    read_by_all,
    ticks_of,
    uses,
)
from deepstow.strategies.core.layout import needs as needs_of

Key: TypeAlias = tuple[str, Item]


def check(
    layout: Layout, addresses: Addresses, facts_params: Iterable[Param] | None = None, hosted_bytes: int = 0
) -> None:
    """Raise ValueError with everything that is wrong with ``layout`` at ``addresses``; see ``validate``."""
    errors = validate(layout, addresses, facts_params, hosted_bytes)
    if errors:
        raise ValueError("this layout cannot be carried out: " + "; ".join(errors))


def validate(
    layout: Layout, addresses: Addresses, facts_params: Iterable[Param] | None = None, hosted_bytes: int = 0
) -> list[str]:
    """Everything that is wrong with ``layout`` at ``addresses``, one sentence each. ``facts_params``: of the model, to
    compare with; ``hosted_bytes``: of saved tensors that wait on the host.
    """
    errors = [*_settings(layout), *_names(layout)]
    for bucket in layout.buckets:
        errors += [f"{bucket.name}: {words}" for words in (*_shape(bucket), *_choices(bucket, layout))]
    if facts_params is not None:
        errors += _params(layout, list(facts_params))
    if errors:
        return errors  # the needs of a broken layout are unknown, so its addresses cannot be checked
    needs = {(need.bucket, need.item): need for bucket in layout.buckets for need in needs_of(bucket, layout)}
    needs |= {(need.bucket, need.item): need for need in common_needs(layout, hosted_bytes)}
    errors += _spots(needs, addresses)
    errors += [] if errors else _common(layout, addresses)
    return errors or [*_overlaps(layout, needs, addresses)]


def _settings(layout: Layout) -> Iterator[str]:
    least = {"accumulation": 1, "moments": 0, "grad_slots": 1, "visit_slots": 1, "window_slots": 1, "max_grad_norm": 0}
    for name, bound in least.items():
        if getattr(layout, name) < bound:
            yield f"{name} = {getattr(layout, name)}: must be at least {bound}"
    for name, count in Counter(layout.units).items():
        if count > 1:
            yield f"unit {name}: {count} have this name"
    if layout.window_elements < 1 or layout.window_elements % ALIGN_BYTES:
        yield f"window_elements = {layout.window_elements}: must be a multiple of {ALIGN_BYTES}, as updates are cut"
    if "moments" not in _uses(layout.moments_as):
        yield f"moments_as = {layout.moments_as}: is no format of moments"
    if layout.in_backward and layout.max_grad_norm > 0:
        yield "updates in backward cannot clip: the norm is known only after it"


def _uses(name: str) -> tuple[str, ...]:
    return FORMATS[name].uses if name in FORMATS else ()


def _names(layout: Layout) -> Iterator[str]:
    for name, count in Counter(bucket.name for bucket in layout.buckets).items():
        if count > 1:
            yield f"bucket {name}: {count} have this name"
    for name, count in Counter(name for bucket in layout.buckets for name in bucket.params).items():
        if count > 1:
            yield f"parameter {name}: is in {count} buckets"


def _shape(bucket: Bucket) -> Iterator[str]:
    if not bucket.name:
        yield "the bucket has no name"
    if bucket.dtype not in ITEM_BYTES:
        yield f"unknown dtype {bucket.dtype}"
        return
    if not bucket.params or not bucket.units:
        yield "has no parameters, or no unit that uses it"
    if not len(bucket.params) == len(bucket.sizes) == len(bucket.offsets):
        yield "params, sizes and offsets are not equally long"
        return
    step, end = ALIGN_BYTES // ITEM_BYTES[bucket.dtype], 0
    for offset, size, name in sorted(zip(bucket.offsets, bucket.sizes, bucket.params, strict=True)):
        if offset % step:
            yield f"{name} is not aligned"
        if size < 0 or offset < end:
            yield f"{name} overlaps what lies before it"
        end = max(end, offset + size)
    if end > bucket.num_elements:
        yield "parameters reach beyond the end"
    if bucket.num_elements % step:
        yield "its size is not aligned"
    if bucket.shards < 1 or bucket.num_elements % bucket.shards:
        yield f"has no {bucket.shards} equal spans"


def _choices(bucket: Bucket, layout: Layout) -> Iterator[str]:
    if unknown := [unit for unit in bucket.units if unit not in layout.units]:
        yield f"no unit {unknown[0]}"
    elif bucket.resident_ticks:
        yield from _residency(bucket, layout)
    if (bucket.site is Site.NONE) is not (bucket.group is None):
        yield "must have an update site if, and only if, it is in a group of the optimizer"
    if bucket.group is not None and bucket.group < 0:
        yield f"group {bucket.group}"
    if bucket.site in (Site.NONE, Site.DEVICE) and bucket.grad_tier is not Tier.DEVICE:
        yield f"its gradients cannot wait on the host: {bucket.site.value}"
    waits_there = bucket.site in (Site.DEVICE, Site.STREAMED) and bucket.grad_tier is Tier.DEVICE
    if bucket.grad_split and not (bucket.shards > 1 and waits_there and layout.accumulation == 1):
        yield "ranks share gradients of one micro-batch that wait on the device, and no others"
    if bucket.grad_direct and not (bucket.site is Site.HOST and bucket.grad_tier is Tier.HOST and bucket.shards == 1):
        yield "its gradients need a slot: only those of one rank that wait on the host for an update there do not"
    once = layout.in_backward and (bucket.grad_tier is Tier.DEVICE or layout.accumulation == 1)
    if bucket.grad_taken and not (once and bucket.site is Site.HOST and bucket.shards == 1):
        yield "only the CPU's update in backward, by one rank, takes a gradient"
    if bucket.state_on_disk and not (bucket.site is Site.HOST and bucket.state_bytes(layout.moments)):
        yield "only state that is updated on the host, and frozen weights, rest on the disk"
    if bucket.copy_on_disk and not bucket.state_on_disk:
        yield "only a trained weight whose state is on the disk rests there, too"
    if bucket.frozen_as and "frozen weights" not in _uses(bucket.frozen_as):
        yield f"{bucket.frozen_as} is no format of frozen weights"
    if layout.moments_as != "fp32" and not (bucket.site in (Site.NONE, Site.HOST) and bucket.shards == 1):
        yield f"only moments of one rank that are updated on the host rest in {layout.moments_as}"
    if layout.moments_as != "fp32" and bucket.state_on_disk:
        yield f"state on the disk rests in fp32, not in {layout.moments_as}"
    if bucket.rounds and not (bucket.dtype == "bfloat16" and layout.moments_as != "fp32" and bucket.group is not None):
        yield "only what is trained in bf16, with moments that do not rest in fp32, has its weight as its master"
    in_memory = bucket.site is Site.NONE and bucket.shards == 1 and not bucket.on_disk
    if bucket.frozen_as and not (in_memory and bucket.dtype in ("float32", "bfloat16")):
        yield f"only frozen weights of one rank, in memory, rest in {bucket.frozen_as}"
    if bucket.on_disk and not layout.disk:
        yield "rests on the disk, and there is no folder"


def _residency(bucket: Bucket, layout: Layout) -> Iterator[str]:
    ends = [-1, *(end for _, end in bucket.resident_ticks)]
    for (start, end), former_end in zip(bucket.resident_ticks, ends, strict=False):
        if not former_end < start < end <= layout.num_ticks:
            yield f"is resident from tick {start} to {end}, after {former_end}, of {layout.num_ticks}"
            return
    resident = {tick for start, end in bucket.resident_ticks for tick in range(start, end)}
    if len(resident) == layout.num_ticks:
        yield "has resident_ticks, but is never evicted"
    for tick in uses(bucket, ticks_of(layout.units)):
        if tick not in resident:
            yield f"is away at tick {tick}, when {layout.units[min(tick, layout.num_ticks - 1 - tick)]} uses it"


def _params(layout: Layout, params: list[Param]) -> Iterator[str]:
    expected = {param.name: param for param in params}
    placed = {name for bucket in layout.buckets for name in bucket.params}
    yield from (f"parameter {name}: in no bucket" for name in expected if name not in placed)
    yield from (f"parameter {name}: not of this model" for name in sorted(placed - expected.keys()))
    for bucket in layout.buckets:
        for name, size in zip(bucket.params, bucket.sizes, strict=False):
            param = expected.get(name)
            if param is None:
                continue
            if size != param.num_elements:
                yield f"parameter {name}: {size} elements instead of {param.num_elements}"
            if (bucket.dtype, bucket.group) != (param.dtype, param.group):
                yield f"parameter {name}: has another dtype or group than its bucket {bucket.name}"
        members = [expected[name] for name in bucket.params if name in expected]
        if set(bucket.units) != {unit for param in members for unit in (param.unit, *param.users)}:
            yield f"{bucket.name}: its units are not those that use its parameters"


def _spots(needs: Mapping[Key, Need], addresses: Addresses) -> Iterator[str]:
    for key, need in needs.items():
        name, spot = _name(key), addresses.spots.get(key)
        if spot is None:
            yield f"{name}: has no address"
            continue
        if spot.tier is not need.tier:
            yield f"{name}: lies on the {spot.tier.value}, not on the {need.tier.value}"
        if spot.num_bytes < need.num_bytes:
            yield f"{name}: has {spot.num_bytes} bytes, needs {need.num_bytes}"
        if spot.offset % aligned(1, spot.tier):
            yield f"{name}: is not aligned"
        if spot.offset < 0 or spot.end > addresses.num_bytes(spot.tier):
            yield f"{name}: lies outside its arena"
    yield from (f"{_name(key)}: has an address and needs none" for key in addresses.spots if key not in needs)


def _common(layout: Layout, addresses: Addresses) -> Iterator[str]:
    """What other ranks read, and what they do not, on the wrong side of where the memory that they read ends."""
    border, read = common_bytes(layout), {(bucket.name, read_by_all(bucket, layout)) for bucket in layout.buckets}
    for key, spot in addresses.spots.items():
        shown = key in read
        if spot.tier is Tier.HOST and (spot.end > border if shown else spot.offset < border):
            yield f"{_name(key)}: lies {'outside of' if shown else 'in'} the memory that other ranks read"


def _overlaps(layout: Layout, needs: Mapping[Key, Need], addresses: Addresses) -> Iterator[str]:
    """Spots with common bytes, unless they are of one item that buckets use in turn: a weight is there at other ticks;
    any other slot begins at the same byte, because the engine knows the former user of a slot by its address.
    """
    stays = {bucket.name: bucket.resident_ticks for bucket in layout.buckets}
    for first, second in _touching(addresses):
        if not (needs[first].passes and needs[second].passes and first[1] is second[1]):
            yield f"{_name(second)} overlaps {_name(first)}"
        elif first[1] is Item.WEIGHT:
            pairs = ((max(a, c), min(b, d)) for a, b in stays[first[0]] for c, d in stays[second[0]])
            if common := [start for start, end in pairs if start < end]:
                names = " and ".join(sorted((first[0], second[0])))
                yield f"{names} share an address, and both are resident at tick {min(common)}"
        elif addresses.of(*first).offset != addresses.of(*second).offset:
            yield f"{_name(second)} overlaps {_name(first)}, and does not begin where it does"


def _touching(addresses: Addresses) -> Iterator[tuple[Key, Key]]:
    """Pairs of spots with common bytes, by a sweep over each tier in order of address."""
    spots = sorted(addresses.spots.items(), key=lambda it: (it[1].tier.value, it[1].offset, it[1].end, _name(it[0])))
    reaching: list[tuple[Key, Spot]] = []
    for key, spot in spots:
        reaching = [(other, its) for other, its in reaching if its.tier is spot.tier and its.end > spot.offset]
        if spot.num_bytes:
            yield from ((other, key) for other, _ in reaching)
        reaching.append((key, spot))


def _name(key: Key) -> str:
    return f"{key[1].value} of {key[0]}" if key[0] else key[1].value
