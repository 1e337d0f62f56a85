"""What hypothesis draws for the engine: odd models, any valid layout of their parameters, and ways to break one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from strategies.core.facts import Home, Param
from strategies.core.layout import (
    ALIGN_BYTES,
    ITEM_BYTES,
    Addresses,
    Bucket,
    Item,
    Layout,
    Range,
    Site,
    Spot,
    ticks_of,
    uses,
)
from strategies.planner.addresses import place
from strategies.planner.weight_schedule import resident_ticks
from tests.helpers.engine import groups_of
from tests.helpers.models import Odd, Spec
from trainer.model.params import list_params

Broken: TypeAlias = tuple[Layout, Addresses]
ODD = st.sampled_from([1, 3, 17, 32])


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Blocks are called in any order, some twice, some never; two may share their inner layer."""
    hidden = draw(st.lists(ODD, min_size=1, max_size=5))
    numbers = st.integers(0, len(hidden) - 1)
    in_order = st.just(list(range(len(hidden))))
    calls = draw(st.one_of(in_order, in_order, st.lists(numbers, min_size=1, max_size=6)))
    later, earlier = draw(numbers), draw(numbers)
    recompute = draw(st.sampled_from([0, 0, 1, 2, 3]))
    frozen = draw(st.sampled_from([0, 0, 3, 5]))
    # Refused, see test_gradients_in_parts_are_refused.
    once = len(set(calls)) == len(calls) and later == earlier
    return Spec(
        width=draw(ODD),
        hidden=tuple(hidden),
        calls=tuple(calls),
        bias=draw(st.booleans()),
        shares=(later, earlier) if later != earlier else None,
        on_root=draw(st.booleans()),
        tied=draw(st.booleans()),
        frozen=frozen,
        dropout=draw(st.sampled_from([0.0, 0.1])),
        recompute=recompute,
        reentrant=once and draw(st.booleans()),
    )


def params_of(model: nn.Module, groups: int) -> tuple[Param, ...]:
    """The parameters one by one, as the planner sees them."""
    group_of = {id(p): number for number, group in enumerate(groups_of(model, groups)) for p in group["params"]}
    numbers = {name: group_of[id(param)] for name, param in model.named_parameters() if id(param) in group_of}
    return list_params(model, numbers, lambda param: str(param.dtype).removeprefix("torch."))


@st.composite
def layouts(draw: st.DrawFn, params: tuple[Param, ...], accumulation: int, max_norm: float) -> Layout:
    """Any valid layout: cuts, sites, stays and parks as they come."""
    pieces: list[list[Param]] = []
    for like in dict.fromkeys((param.dtype, param.group) for param in params):
        alike = [param for param in params if (param.dtype, param.group) == like]
        cuts = sorted(draw(st.sets(st.integers(0, len(alike)), max_size=6)) | {0, len(alike)})
        pieces += [alike[start:stop] for start, stop in pairwise(cuts)]
    pieces.sort(key=lambda piece: params.index(piece[0]))
    units = tuple(dict.fromkeys(unit for param in params for unit in (param.unit, *param.users)))
    return Layout(
        buckets=tuple(draw(bucket(f"b{index}", piece, units)) for index, piece in enumerate(pieces)),
        units=units,
        in_backward=max_norm == 0 and draw(st.booleans()),
        accumulation=accumulation,
        max_grad_norm=max_norm,
        grad_slots=draw(st.integers(1, 3)),
        visit_slots=draw(st.integers(1, 3)),
        keeps_copies=draw(st.booleans()),
    )


@st.composite
def bucket(draw: st.DrawFn, name: str, piece: list[Param], order: tuple[str, ...]) -> Bucket:
    """A bucket of ``piece``. Parameters of the root are in use all the time; theirs stay."""
    units = tuple(dict.fromkeys(unit for param in piece for unit in (param.unit, *param.users)))
    dtype, group = piece[0].dtype, piece[0].group
    step = ALIGN_BYTES // ITEM_BYTES[dtype]
    offsets, end = [], 0
    for param in piece:
        offsets.append(end)
        end += -(-param.num_elements // step) * step
    site = Site.NONE if group is None else draw(st.sampled_from([Site.DEVICE, Site.HOST, Site.STREAMED]))
    stays: tuple[Range, ...] = ()
    if all("." in param.name for param in piece):
        used = {step for unit in units for step in ticks_of(order)[unit]}
        here = used | draw(st.sets(st.integers(0, 2 * len(order) - 1)))
        stays = draw(st.sampled_from([(), *3 * [resident_ticks(here, 2 * len(order))]]))
    return Bucket(
        name=name,
        units=units,
        params=tuple(param.name for param in piece),
        sizes=tuple(param.num_elements for param in piece),
        offsets=tuple(offsets),
        num_elements=end,
        dtype=dtype,
        group=group,
        site=site,
        resident_ticks=stays,
        grad_home=Home.DEVICE if site in (Site.NONE, Site.DEVICE) else draw(st.sampled_from(Home)),
    )


def odd_model(spec: Spec, dtype: torch.dtype = torch.float32) -> Odd:
    """The same model of ``spec`` each time."""
    torch.manual_seed(0)
    return Odd(spec).to(dtype)


# --- breaking ---------------------------------------------------------------------------------------------------------


def _change(layout: Layout, index: int, **changes: Any) -> Layout:
    buckets = list(layout.buckets)
    buckets[index] = replace(buckets[index], **changes)
    return replace(layout, buckets=tuple(buckets))


def _any(layout: Layout, data: st.DataObject, ok: Callable[[Bucket], bool] = lambda b: True) -> int:
    fitting = [index for index, b in enumerate(layout.buckets) if ok(b)]
    assume(fitting)
    return data.draw(st.sampled_from(fitting))


def _moved(addresses: Addresses, key: tuple[str, Item], **changes: Any) -> Addresses:
    return replace(addresses, spots={**addresses.spots, key: replace(addresses.spots[key], **changes)})


def overlap(layout: Layout, data: st.DataObject) -> Broken:
    """Two permanent spots at one address."""
    addresses = place(layout)
    permanent = (Item.MOMENTS, Item.STEPS, Item.MASTER, Item.COPY)
    keys = [key for key in addresses.spots if key[1] in permanent]
    one = data.draw(st.sampled_from(sorted(keys, key=str))) if keys else assume(False)
    home = addresses.spots[one].home
    others = sorted((key for key in keys if key != one and addresses.spots[key].home is home), key=str)
    assume(others)
    other: Spot = addresses.spots[data.draw(st.sampled_from(others))]
    assume(other.num_bytes >= addresses.spots[one].num_bytes)
    return layout, _moved(addresses, one, offset=other.offset)


def outside(layout: Layout, data: st.DataObject) -> Broken:
    addresses = place(layout)
    key = data.draw(st.sampled_from(sorted(addresses.spots, key=str)))
    end = addresses.num_bytes(addresses.spots[key].home)
    return layout, _moved(addresses, key, offset=end)


def lost_spot(layout: Layout, data: st.DataObject) -> Broken:
    addresses = place(layout)
    gone = data.draw(st.sampled_from(sorted(addresses.spots, key=str)))
    return layout, replace(addresses, spots={key: spot for key, spot in addresses.spots.items() if key != gone})


def other_home(layout: Layout, data: st.DataObject) -> Broken:
    addresses = place(layout)
    key = data.draw(st.sampled_from(sorted(addresses.spots, key=str)))
    home = Home.HOST if addresses.spots[key].home is Home.DEVICE else Home.DEVICE
    return layout, _moved(addresses, key, home=home)


def same_parameter_twice(layout: Layout, data: st.DataObject) -> Broken:
    index = _any(layout, data)
    b, size = layout.buckets[index], layout.buckets[index].sizes[0]
    end = b.num_elements
    more = -(-size * ITEM_BYTES[b.dtype] // ALIGN_BYTES) * ALIGN_BYTES // ITEM_BYTES[b.dtype]
    made = _change(
        layout,
        index,
        params=(*b.params, b.params[0]),
        sizes=(*b.sizes, size),
        offsets=(*b.offsets, end),
        num_elements=end + more,
    )
    return made, place(made)


def lost_parameter(layout: Layout, data: st.DataObject) -> Broken:
    index = _any(layout, data, lambda b: len(b.params) > 1)
    b = layout.buckets[index]
    made = _change(layout, index, params=b.params[:-1], sizes=b.sizes[:-1], offsets=b.offsets[:-1])
    return made, place(made)


def lost_bucket(layout: Layout, data: st.DataObject) -> Broken:
    index = _any(layout, data)
    made = replace(layout, buckets=layout.buckets[:index] + layout.buckets[index + 1 :])
    return made, place(made)


def parks_below_the_device(layout: Layout, data: st.DataObject) -> Broken:
    made = _change(layout, _any(layout, data, lambda b: b.site is Site.DEVICE), grad_home=Home.HOST)
    return made, place(made)


def away_when_used(layout: Layout, data: st.DataObject) -> Broken:
    index = _any(layout, data, lambda b: not b.resident)
    b = layout.buckets[index]
    used = data.draw(st.sampled_from(uses(b, ticks_of(layout.units))))
    here = {step for start, end in b.resident_ticks for step in range(start, end)} - {used}
    assume(here)
    return _change(layout, index, resident_ticks=resident_ticks(here, layout.num_ticks)), place(layout)


def wrong_size(layout: Layout, data: st.DataObject) -> Broken:
    index = _any(layout, data)
    sizes = layout.buckets[index].sizes
    made = _change(layout, index, sizes=(*sizes[:-1], sizes[-1] + data.draw(st.sampled_from([-1, 1]))))
    return made, place(made)


def wrong_group(layout: Layout, data: st.DataObject) -> Broken:
    made = _change(layout, _any(layout, data, lambda b: b.group is not None), group=7)
    return made, place(made)


def not_frozen(layout: Layout, data: st.DataObject) -> Broken:
    made = _change(layout, _any(layout, data, lambda b: b.group is None), group=0, site=Site.DEVICE)
    return made, place(made)


def clips_in_backward(layout: Layout, data: st.DataObject) -> Broken:
    made = replace(layout, in_backward=True, max_grad_norm=1.0)
    return made, place(made)


def one_address_for_one_step(layout: Layout, data: st.DataObject) -> Broken:
    """Two travelling buckets that are there together, at one address."""
    addresses = place(layout)
    here = {b.name: {s for start, end in b.resident_ticks for s in range(start, end)} for b in layout.buckets}
    pairs = [(a, b) for a in here for b in here if a < b and here[a] & here[b]]
    assume(pairs)
    one, other = data.draw(st.sampled_from(pairs))
    small, large = sorted((one, other), key=lambda name: addresses.of(name, Item.WEIGHT).num_bytes)
    return layout, _moved(addresses, (small, Item.WEIGHT), offset=addresses.of(large, Item.WEIGHT).offset)


BREAKS: Mapping[str, Callable[[Layout, st.DataObject], Broken]] = {
    made.__name__.replace("_", " "): made
    for made in (
        overlap,
        outside,
        lost_spot,
        other_home,
        same_parameter_twice,
        lost_parameter,
        lost_bucket,
        parks_below_the_device,
        away_when_used,
        wrong_size,
        wrong_group,
        not_frozen,
        clips_in_backward,
        one_address_for_one_step,
    )
}
