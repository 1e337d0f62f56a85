"""A parameter that is frozen after ``stow`` is left alone, as in plain training, and trains on when it is unfrozen."""

from typing import Any

import pytest
import torch
from torch import nn

from strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import differences, plain, plan_of, stowed
from tests.helpers.models import build, tokens

PLANS: dict[str, dict[str, Any]] = {
    "device": {"site": "device"},
    "device, travelling": {"site": "device", "weights": "travelling", "prefetch": 1},
    "host": {"site": "host", "park": "host"},
    "host, direct": {"site": "host", "park": "host", "direct": True},
    "host, travelling": {"site": "host", "weights": "travelling", "bucket": "half"},
    "streamed": {"site": "streamed", "weights": "travelling", "park": "host", "prefetch": 0},
    "in backward": {"site": "streamed", "in_backward": True},
}
# One parameter of a bucket, all of one, and what is used outside of blocks.
FROZEN = ("model.layers.0.self_attn.k_proj.", "model.layers.1.", "lm_head.", "model.embed_tokens.")
STEPS, FROM, UNTIL = 5, 1, 3


def freezing(model: nn.Module, *, after: bool = False) -> nn.Module:
    """``model``, which freezes some parameters itself at the start of one step and unfreezes them later; ``after``: at
    the end of a forward, whose backward then has gradients that torch drops.
    """
    forwards = [0]

    def change(module: nn.Module, *_: Any) -> None:
        step = forwards[0] // model.accumulation  # type: ignore[operator]
        forwards[0] += 1
        for name, param in model.named_parameters():
            if name.startswith(FROZEN):
                param.requires_grad_(not FROM <= step < UNTIL)

    model.accumulation = 1  # type: ignore[assignment]
    if after:
        model.register_forward_hook(change)
    else:
        model.register_forward_pre_hook(change)
    return model


@pytest.mark.parametrize(
    ("dtype", "accumulation", "after", "transfer"),
    [
        (torch.float32, 1, False, RaceDetector),
        (torch.bfloat16, 2, False, Delayed),
        (torch.float32, 1, True, Delayed),
    ],
    ids=["fp32", "bf16", "after forward"],
)
@pytest.mark.parametrize("where", PLANS.values(), ids=PLANS)
@pytest.mark.usefixtures("one_thread")
def test_frozen_and_unfrozen(
    where: dict[str, Any], dtype: torch.dtype, accumulation: int, after: bool, transfer: type[Transfer]
) -> None:
    loop: dict[str, Any] = {"accumulation": accumulation, "max_norm": 0.0 if "in_backward" in where else 0.05}
    batches = tokens("llama", STEPS * accumulation)

    def made() -> Any:
        model: Any = freezing(build("llama", dtype=dtype), after=after)
        model.accumulation = accumulation
        return model

    wanted = plain(made(), batches, **loop)
    counts = {int(value) for name, value in wanted.tensors.items() if name.endswith(" step")}
    assert counts == {STEPS, STEPS - 2 - after}
    model = made()
    found = stowed(model, plan_of(model, **where, **loop), batches, transfer=transfer(), **loop)
    assert differences(wanted, found) == []
