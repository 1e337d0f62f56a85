"""A parameter that is frozen after ``stow`` is left alone, as in plain training, and trains on when it is unfrozen."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import LAYOUTS
from tests.helpers.models import build, tokens
from tests.helpers.sides import CPU, both_sides, plainly, train

PLANS: list[dict[str, Any]] = [*LAYOUTS.values(), {"site": "host", "park": "host", "direct": True}]
IN_BACKWARD: list[dict[str, Any]] = [{"site": "streamed", "in_backward": True}]
# One parameter of a bucket, all of one, and what is used outside of blocks.
FROZEN = ("model.layers.0.self_attn.k_proj.", "model.layers.1.", "lm_head.", "model.embed_tokens.")
STEPS, FROM, UNTIL = 5, 1, 3


def freezing(dtype: torch.dtype = torch.float32, accumulation: int = 1, *, after: bool = False) -> nn.Module:
    """A model that freezes some parameters itself at the start of one step and unfreezes them later; ``after``: at the
    end of a forward, whose backward then has gradients that torch drops.
    """
    model, forwards = build("llama", dtype=dtype), itertools.count()

    def change(*_: Any) -> None:
        step = next(forwards) // accumulation
        for name, param in model.named_parameters():
            if name.startswith(FROZEN):
                param.requires_grad_(not FROM <= step < UNTIL)

    register: Any = model.register_forward_hook if after else model.register_forward_pre_hook
    register(change)
    return model


def clips(model: Any, optimizer: Any) -> float:
    return float(optimizer.clip_grad_norm_(0.05))


CASES: dict[str, tuple[Any, int, type[Transfer]]] = {  # each in every other plan
    "bf16": (partial(freezing, torch.bfloat16, 2), 2, Delayed),
    "after forward": (partial(freezing, after=True), 1, RaceDetector),
}


@pytest.mark.parametrize("case", CASES)
def test_frozen_and_unfrozen(case: str) -> None:
    make, count, transfer = CASES[case]
    for plans, between, norm in ((PLANS[count % 2 :: 2], clips, 0.05), (IN_BACKWARD, None, 0.0)):
        script = partial(train, batches=tokens("llama", STEPS * count), between=between, passes=(count,))
        how: dict[str, Any] = {"max_norm": norm, "accumulation": count, "transfer": transfer, "beside": True}
        both_sides(make, script, plans, **how)
    counts = {int(value) for name, value in plainly(make, script, 0.0, True, CPU)[1].items() if name.endswith(" step")}
    assert counts == {STEPS, STEPS - 2 - (case == "after forward")}
