"""Recomputation, and saved tensors on the host, on a device that is really asynchronous."""

from typing import Any

import pytest
import torch

from strategies.engine.checkpointing import recompute, room_of
from strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.helpers.models import on
from tests.parity.test_activations import quiet
from tests.parity.test_recompute import MACHINE, POLICIES, decided, made, micro_batches, steps, unequal
from trainer.planning.plan_for import plan_for

DEVICE = "sim:0"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bits(name: str, attention: str, dtype: torch.dtype, policy: str) -> None:
    batches = [{key: value.to(DEVICE) for key, value in batch.items()} for batch in micro_batches()] * 2
    model = made(name, True, attention, dtype)
    facts = plan_for(model, batch=micro_batches()[0], max_grad_norm=None, machine=MACHINE).facts
    plain, model = on(DEVICE, made(name, True, attention, dtype)), on(DEVICE, model)
    recompute(model, decided(facts, POLICIES[policy]), AcceleratorTransfer(torch.device(DEVICE)), DEVICE)
    assert unequal(steps(plain, batches), steps(model, batches)) == []
    room: Any = room_of(model)
    assert room is None or quiet(room)
    if "on the host" in policy:
        assert min(room.traffic) > 0
