"""Nobody waits for the device within a step: what would make the host wait on a GPU is counted on any machine.

Counted in the thread of the loop: numbers that are taken from a tensor, and events that are waited for. The worker's
waits are its own affair: it sleeps.
"""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.engine.transfer.transfer import Event, Transfer
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, LAYOUTS, stowed

pytestmark = pytest.mark.usefixtures("one_thread")
WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::unique"}


class Waits(TorchDispatchMode):
    """Counts in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Watched(Transfer):
    """Remembers who waits for events."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []

    def host_wait(self, *events: Event | None) -> None:
        self.waited.append(threading.current_thread().name)
        super().host_wait(*events)


def waits(layout: str, fused: bool = True, norm: float = 0.5, accumulation: int = 1) -> list[str]:
    """In two steps after two that warm up."""
    model, transfer = build("llama"), Watched()
    loop: dict[str, Any] = {"max_norm": norm, "accumulation": accumulation}
    optimizer = stowed(model, layout, fused, transfer, beside=True, **loop)
    counted = Waits()
    for number in range(4):
        if number == 2:
            transfer.waited.clear()
        with counted if number > 1 else nullcontext():
            for batch in BATCHES[:accumulation]:
                model(**batch).loss.backward()
            optimizer.clip_grad_norm_(norm) if norm else None
            optimizer.step()
            optimizer.zero_grad()
    found = counted.seen + [name for name in transfer.waited if name == threading.current_thread().name]
    optimizer.close()
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("norm", [0.0, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_waits_for_nothing(layout: str, norm: float, accumulation: int) -> None:
    assert waits(layout, True, norm, accumulation) == []


def test_what_waits_is_counted() -> None:
    """Torch's kernel that is not fused asks for its counts one by one."""
    assert waits("device, resident", fused=False)
