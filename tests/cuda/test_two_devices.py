"""Training on a device that is not the current one: every stream, event and buffer names its device."""

from typing import Any

import pytest
import torch

from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.helpers.engine import differences, plain, plan_of, stowed
from tests.helpers.grid import batches_on
from tests.helpers.models import build, on

LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {"site": "device"},
    "host": {"site": "host", "weights": "travelling", "park": "host", "prefetch": 1},
    "streamed": {"site": "streamed", "weights": "travelling", "park": "host", "prefetch": 1},
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices: FAKE_CUDA_DEVICES=2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_second_device(name: str) -> None:
    """With the bits of plain training there; nothing is put on the current device, which stays the current one."""
    there = "cuda:1"
    batches, model = batches_on(there, "llama", 3), build("llama")
    expected = plain(on(there, build("llama")), batches, max_norm=0.05)
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_stats(0).get("allocation.all.allocated", 0)
    plan = plan_of(model, max_norm=0.05, **LAYOUTS[name])
    moves = AcceleratorTransfer(torch.device(there))
    found = stowed(model, plan, batches, max_norm=0.05, device=there, transfer=moves)
    assert differences(expected, found) == []
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_stats(0).get("allocation.all.allocated", 0) == before, "something is on the first device"
