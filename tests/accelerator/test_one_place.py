"""Weights that are wanted while gradients are in their place, on a device that is really asynchronous.

Each loop updates once on the host and once on the device; the layouts take turns.
"""

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


HOST, STREAMED = ([name for name in LAYOUTS if name.startswith(kind)] for kind in ("host", "streamed"))
CASES = [
    pytest.param(layouts[number % len(layouts)], loop, id=f"{layouts[number % len(layouts)]}-{loop.__name__}")
    for number, loop in enumerate(LOOPS)
    for layouts in (HOST, STREAMED)
]


@pytest.mark.parametrize(("layout", "loop"), CASES)
def test_loops(layout: str, loop: Loop) -> None:
    compare(loop, layout, AcceleratorTransfer(torch.device(DEVICE)))
