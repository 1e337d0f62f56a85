"""The engine on models and layouts that nobody would choose: odd sizes, any cuts, sites, stays and orders of use.

Valid layouts train with the bits of plain training; a broken one is refused before anything is touched.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from strategies.core.layout import Item
from strategies.engine import stow
from strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.draws import layouts, odd_model, params_of, specs
from tests.helpers.engine import Made, differences, groups_of, plain, plan_of, stowed
from tests.helpers.models import Spec, build, odd_batches

STEADY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
}
loops = st.fixed_dictionaries(
    {
        "accumulation": st.sampled_from([1, 1, 2]),
        "max_norm": st.sampled_from([0.0, 0.01, 1e6]),
        "groups": st.sampled_from([1, 2]),
    }
)


def trainable(spec: Spec) -> bool:
    """Whether any parameter that is used has a gradient."""
    model = odd_model(spec)
    loss = model(**odd_batches(1)[0]).loss
    return bool(loss.requires_grad) and len({id(group) for group in groups_of(model, 2) if group["params"]}) == 2


@settings(max_examples=80, **STEADY)
@given(specs(), loops, st.sampled_from([*3 * [torch.float32], torch.bfloat16]), st.data())
def test_any_layout_of_any_model(spec: Spec, loop: dict[str, Any], dtype: torch.dtype, data: st.DataObject) -> None:
    assume(trainable(spec))
    batches = odd_batches(3 * loop["accumulation"])
    model = odd_model(spec, dtype)
    params = params_of(model, loop["groups"])
    layout = data.draw(layouts(params, loop["accumulation"], loop["max_norm"]))
    transfer: Transfer = data.draw(st.sampled_from([Delayed, RaceDetector]))()
    wanted = plain(odd_model(spec, dtype), batches, **loop)
    assert differences(wanted, stowed(model, Made.of(layout, params), batches, transfer=transfer, **loop)) == []


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
