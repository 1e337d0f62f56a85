"""What hypothesis draws for the engine: odd models, and any valid layout of their parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import nn

from strategies.core.facts import Home, Param
from strategies.core.layout import Bucket, Layout, Range, Site, ticks_of
from strategies.planner import buckets
from strategies.planner.weight_schedule import resident_ticks
from tests.helpers.engine import groups_of
from tests.helpers.models import Odd, Spec, build
from trainer.model.params import list_params

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
    """A bucket of ``piece``. It stays if one of its parameters is in use while other units run."""
    made = buckets._bucket(name, piece, {unit: index for index, unit in enumerate(order)}, 1)
    site = Site.NONE if made.group is None else draw(st.sampled_from([Site.DEVICE, Site.HOST, Site.STREAMED]))
    stays: tuple[Range, ...] = ()
    if not any(param.elsewhere for param in piece):
        used = {step for unit in made.units for step in ticks_of(order)[unit]}
        here = used | draw(st.sets(st.integers(0, 2 * len(order) - 1)))
        stays = draw(st.sampled_from([(), *3 * [resident_ticks(here, 2 * len(order))]]))
    grad_home = Home.DEVICE if site in (Site.NONE, Site.DEVICE) else draw(st.sampled_from(Home))
    return replace(made, site=site, resident_ticks=stays, grad_home=grad_home)


def odd_model(spec: Spec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model of ``spec`` each time."""
    return build(lambda: Odd(spec), dtype=dtype)
