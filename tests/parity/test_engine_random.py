"""The engine on models and layouts that nobody would choose: odd sizes, any cuts, sites, stays and orders of use.

Valid layouts train with the bits of plain training; a broken one is refused before anything is touched.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from deepstow.strategies.core.facts import Param, Tier
from deepstow.strategies.core.layout import Bucket, Item, Layout, Range, Site, ticks_of
from deepstow.strategies.engine import stow
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.planner import buckets
from deepstow.strategies.planner.weight_schedule import resident_ticks
from deepstow.trainer.model.params import list_params
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import Made, differences, groups_of, plain, plan_of, stowed
from tests.helpers.models import Odd, Spec, build, odd_batches

STEADY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
}
loops = st.fixed_dictionaries(
    {
        "accumulation": st.sampled_from([1, 2]),
        "max_norm": st.sampled_from([0.0, 0.01, 1e6]),
        "groups": st.sampled_from([1, 2]),
    }
)
ODD = st.sampled_from([1, 3, 17, 32])


def odd_model(spec: Spec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model of ``spec`` each time."""
    return build(lambda: Odd(spec), dtype=dtype)


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
    in_backward = max_norm == 0 and draw(st.booleans())
    made = tuple(draw(bucket(f"b{index}", piece, units)) for index, piece in enumerate(pieces))
    takes = in_backward and accumulation == 1 and draw(st.booleans())
    return Layout(
        buckets=tuple(replace(b, grad_taken=takes and b.site is Site.HOST and not b.mixed) for b in made),
        units=units,
        in_backward=in_backward,
        accumulation=accumulation,
        max_grad_norm=max_norm,
        grad_slots=draw(st.integers(1, 3)),
        visit_slots=draw(st.integers(1, 3)),
    )


@st.composite
def bucket(draw: st.DrawFn, name: str, piece: list[Param], order: tuple[str, ...]) -> Bucket:
    """A bucket of ``piece``. It stays if one of its parameters is in use while other units run."""
    like = buckets._like(piece[0], frozenset())
    made = buckets._bucket(name, piece, {unit: index for index, unit in enumerate(order)}, 1, like)
    site = Site.NONE if made.group is None else draw(st.sampled_from([Site.DEVICE, Site.HOST, Site.STREAMED]))
    stays: tuple[Range, ...] = ()
    if not any(param.elsewhere for param in piece):
        used = {step for unit in made.units for step in ticks_of(order)[unit]}
        here = used | draw(st.sets(st.integers(0, 2 * len(order) - 1)))
        stays = draw(st.sampled_from([(), *3 * [resident_ticks(here, 2 * len(order))]]))
    grad_tier = Tier.DEVICE if site in (Site.NONE, Site.DEVICE) else draw(st.sampled_from(Tier))
    direct = (site, grad_tier) == (Site.HOST, Tier.HOST) and draw(st.booleans())
    return replace(made, site=site, resident_ticks=stays, grad_tier=grad_tier, grad_direct=direct)


def trainable(spec: Spec) -> bool:
    """Whether any parameter that is used has a gradient."""
    model = odd_model(spec)
    loss = model(**odd_batches(1)[0]).loss
    return bool(loss.requires_grad) and len({id(group) for group in groups_of(model, 2) if group["params"]}) == 2


@settings(max_examples=25, **STEADY)
@given(specs(), loops, st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_any_layout_of_any_model(spec: Spec, loop: dict[str, Any], dtype: torch.dtype, data: st.DataObject) -> None:
    assume(trainable(spec))
    batches = odd_batches(3 * loop["accumulation"])
    model = odd_model(spec, dtype)
    params = params_of(model, loop["groups"])
    layout = data.draw(layouts(params, loop["accumulation"], loop["max_norm"]))
    transfer: Transfer = data.draw(st.sampled_from([Delayed, RaceDetector]))()
    wanted = plain(odd_model(spec, dtype), batches, **loop)
    try:
        found = stowed(model, Made.of(layout, params), batches, transfer=transfer, **loop)
    except RuntimeError as error:  # fewer slots than buckets that get gradients at once, which no planner makes
        assert any(bucket.grad_taken for bucket in layout.buckets) and "needs the place of the gradients" in str(error)
        return
    assert differences(wanted, found) == []


@pytest.mark.parametrize("spec", [{"shares": (2, 0), "calls": (0, 1, 2)}, {"calls": (0, 1, 0)}], ids=["layer", "block"])
def test_gradients_in_parts_are_refused(spec: dict[str, Any]) -> None:
    """Reentrant checkpoints deliver the gradient of what two of them use in two parts, as two backward passes would."""
    model = odd_model(Spec(width=8, hidden=(4, 4, 4), recompute=1, reentrant=True, **spec))
    with pytest.raises(RuntimeError, match="a backward pass after the gradients of 1 were complete"):
        stowed(model, plan_of(model), odd_batches(1))


def test_a_layout_that_cannot_be_carried_out_is_refused() -> None:
    """Two moments at one address; the model stays as it is. ``tests/unit/test_validate.py`` has all that is refused."""
    model = build("few")
    plan: Any = plan_of(model, bucket="several", site="device")
    addresses = plan.place.addresses
    (_, spot), (other, _) = [item for item in addresses.spots.items() if item[0][1] is Item.MOMENTS][:2]
    wrong = replace(addresses, spots={**addresses.spots, other: spot})
    broken = replace(plan, place=SimpleNamespace(addresses=wrong, debug=True))
    weights = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ValueError, match="cannot be carried out"):
        stow(model, broken, device="cpu")
    assert weights == [param.data_ptr() for param in model.parameters()]
    stow(model, plan, device="cpu").close()
