"""Frozen weights in fp8 on a device that is asynchronous: they are made whole of codes that are still on their way."""

from typing import Any

import pytest
import torch

from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.accelerator import chosen
from tests.helpers.engine import differences, plain, stowed
from tests.helpers.grid import batches_on
from tests.helpers.models import on
from tests.parity.test_disk_weights import base
from tests.parity.test_fp8 import STAYS, TRAVELS, planned, round_blocks

DEVICE = f"{chosen.kind}:0"


@pytest.mark.parametrize(
    ("where", "dtype"), [(STAYS, torch.float32), (TRAVELS, torch.bfloat16)], ids=["stays", "travels"]
)
def test_bits(where: Any, dtype: torch.dtype, device: Any) -> None:
    batches, model = batches_on(DEVICE, "llama", 3), base(dtype)
    expected = plain(on(DEVICE, round_blocks(base(dtype))), batches)
    before = device.counts()["async_copies"]
    moves = AcceleratorTransfer(torch.device(DEVICE))
    found = stowed(model, planned(model, **where), batches, transfer=moves, device=DEVICE)
    assert differences(expected, found) == []
    assert device.counts()["async_copies"] - before > (15 if where is TRAVELS else 3)
