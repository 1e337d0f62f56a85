"""Recomputation, and saved tensors on the host, on a device that is really asynchronous."""

from typing import Any

import pytest
import torch

from deepstow.strategies.engine import stow
from deepstow.strategies.engine.forward.checkpointing import recompute, room_of
from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from deepstow.trainer.planning.plan_for import plan_for
from tests.accelerator import chosen
from tests.helpers.models import on
from tests.parity.test_activations import quiet
from tests.parity.test_recompute import (
    DTYPES,
    MACHINE,
    POLICIES,
    decided,
    facts_of,
    made,
    micro_batches,
    steps,
    unequal,
)

DEVICE = f"{chosen.kind}:0"


@pytest.mark.parametrize(  # other policies choose among what these do
    ("name", "attention", "dtype", "policy"),
    [
        ("gpt2", "eager", "fp32", "selective"), ("llama", "sdpa", "bf16", "full"),
        ("gpt2", "sdpa", "bf16", "selective, on the host"), ("llama", "eager", "fp32", "full, on the host"),
    ],
)  # fmt: skip
def test_bits(name: str, attention: str, dtype: str, policy: str) -> None:
    how: Any = (name, True, attention, DTYPES[dtype])
    batches = [{key: value.to(DEVICE) for key, value in batch.items()} for batch in micro_batches()] * 2
    plain, model = on(DEVICE, made(*how)), on(DEVICE, made(*how))
    recompute(model, decided(facts_of(*how), POLICIES[policy]), AcceleratorTransfer(torch.device(DEVICE)), DEVICE)
    assert unequal(steps(plain, batches), steps(model, batches)) == []
    room: Any = room_of(model)
    assert room is None or quiet(room)
    if "on the host" in policy:
        assert min(room.traffic) > 0


def test_close_while_a_graph_is_half_way(device: Any) -> None:
    """Copies of saved tensors are under way; the device notices if memory is unregistered under one."""
    model = made("llama", False, "sdpa", torch.float32)
    batch = {key: value.to(DEVICE) for key, value in micro_batches()[0].items()}
    options = {"policy": "selective", "activation_offloading": True}
    plan = plan_for(model, batch=micro_batches()[0], max_grad_norm=None, machine=MACHINE, recompute=options)
    recompute(model, plan, AcceleratorTransfer(torch.device(DEVICE)))
    optimizer = stow(model, plan, device=DEVICE)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    room: Any = room_of(model)
    sent = min(room.traffic)
    device.delay(200_000, 100)
    middle: list[Any] = []
    handle = model.model.layers[0].register_forward_hook(lambda module, inputs, output: middle.append(output))
    loss = model(**batch).loss
    torch.autograd.grad(loss, middle[0])  # starts copies up for the first block, which nobody reads
    handle.remove()
    optimizer.close()
    torch.accelerator.synchronize()
    assert min(room.traffic) > sent > 0 and room.num_refused == 0
