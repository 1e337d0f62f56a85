"""Weights that are wanted while gradients are in their place, on a device that is really asynchronous."""

from collections.abc import Iterator

import pytest
import torch

from strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.helpers import sides
from tests.parity.test_one_place import LAYOUTS, LOOPS, Loop, compare

DEVICE = "sim:0"


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sides.ground, "device", torch.device(DEVICE))
    yield


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loops(layout: str, loop: Loop) -> None:
    compare(loop, layout, AcceleratorTransfer(torch.device(DEVICE)))
