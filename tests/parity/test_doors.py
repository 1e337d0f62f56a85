"""The ways into a stowed model that libraries use in their own manner: state dicts of both kinds, ``present``."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import build, tokens
from tests.helpers.sides import LAYOUTS, both_sides, everything, stowed, train, unequal

BATCHES = tokens("llama", 8)


def llama() -> nn.Module:
    return build("llama")


# --- the optimizer's state dict --------------------------------------------------------------------------------------


def test_a_state_dict_with_other_ids() -> None:
    """Saved parameters are ours in the order of their groups, whatever they are called, as in torch's optimizers."""

    def script(model: nn.Module, optimizer: Any) -> list[float]:
        losses = train(model, optimizer, BATCHES[:2])
        state, names = copy.deepcopy(optimizer.state_dict()), [name for name, _ in model.named_parameters()]
        state["state"] = {names[index]: value for index, value in reversed(state["state"].items())}
        for group in state["param_groups"]:
            group["params"] = [names[index] for index in group["params"]]
        losses += train(model, optimizer, BATCHES[2:4])
        optimizer.load_state_dict(state)
        return losses + train(model, optimizer, BATCHES[4:6])

    both_sides(llama, script, LAYOUTS)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda state: state["param_groups"][0]["params"].pop(), "doesn't match the size of optimizer's group"),
        (lambda state: state["state"][3].pop("exp_avg_sq"), "exp_avg_sq missing in the saved state, which has step"),
        (lambda state: state["state"][3].update(exp_avg=torch.ones(1)), r"exp_avg was saved with shape \[1\]"),
    ],
    ids=["one less", "half of it", "another shape"],
)
def test_a_state_dict_of_the_optimizer_that_does_not_fit(spoil: Callable[[Any], object], said: str) -> None:
    model = llama()
    optimizer = stowed(model, "host, one ahead")
    train(model, optimizer, BATCHES[:1])
    before, state = everything(model, optimizer), copy.deepcopy(optimizer.state_dict())
    spoil(state)
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(state)
    assert unequal(before, everything(model, optimizer)) == [] and optimizer.param_groups[0]["lr"] != 7.0
