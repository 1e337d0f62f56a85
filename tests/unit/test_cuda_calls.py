"""How CUDA is called, with stand-ins that refuse what CUDA refuses. What it computes is for a machine with a GPU."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from strategies.runtime.gradients import _together
from strategies.runtime.transfer import CudaTransfer, Lane
from strategies.runtime.worker import Worker
from trainer.differences import repeatable
from trainer.errors import UserError
from trainer.timing import UnitClock

DEVICE = torch.device("cuda", 1)


class Event:
    """Is not over before somebody has waited for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.blocking, self.over = blocking, False

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        self.over = True

    def elapsed_time(self, other: "Event") -> float:
        if not (self.over and other.over):
            raise RuntimeError("device not ready")
        return 1.0


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.events: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stream]]:
    """``torch.cuda`` as far as it is called here; the last stream of the list is the current one."""
    current = [Stream()]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    for name, value in {"Event": Event, "Stream": Stream, "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    yield current


def test_a_device_that_lags_behind_is_waited_for(cuda: list[Stream]) -> None:
    block = nn.Linear(2, 2)
    clock = UnitClock({"block": block}, cuda=True)
    x = torch.ones(1, 2, requires_grad=True) * 1
    with clock.forward():
        loss = block(x).sum()
    loss.backward()
    seconds = clock.seconds()
    assert seconds is not None and seconds.block == (1e-3, 1e-3)


def test_who_waits_for_an_event_sleeps(cuda: list[Stream]) -> None:
    event = CudaTransfer(DEVICE).record(Lane.UP)
    assert event.handle.blocking


def test_compute_is_one_stream(cuda: list[Stream]) -> None:
    transfer = CudaTransfer(DEVICE)
    transfer.wait(Lane.COMPUTE, transfer.record(Lane.UP))
    assert len(cuda[-1].events) == 1
    with torch.cuda.stream(Stream()), pytest.raises(RuntimeError, match="runs on the stream on which it first ran"):
        transfer.record(Lane.COMPUTE)


def test_poison_is_on_the_lane_that_overwrites_it(cuda: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, seen = CudaTransfer(DEVICE), []
    region = torch.zeros(3)
    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: (seen.append(cuda[-1]), fill(self, value))[1])
    transfer.poison(Lane.UP, region)
    assert seen == [transfer._streams[Lane.UP]] and region.isnan().all()


def test_the_worker_sets_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread(), device)))
    worker = Worker(1, DEVICE)
    thread = worker.submit(0, threading.current_thread).result()
    worker.close()
    assert seen == [(thread, DEVICE)]


def test_norms_from_the_host_go_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **more: (calls.append(more), to(self, "cpu"))[1])
    norms = [torch.tensor(float(number)) for number in range(5)]
    assert _together(norms, DEVICE) == norms and calls == [{"non_blocking": True}]


def test_plain_training_that_does_not_repeat_itself_proves_nothing() -> None:
    runs = [{"weights": {"w": torch.tensor([1.0])}}, {"weights": {"w": torch.tensor([1.5])}}]
    assert repeatable(lambda: runs[0], twice=True) is runs[0]
    with pytest.raises(UserError, match="itself here: 1 tensors differ between two runs, w by 5"):
        repeatable(iter(runs).__next__, twice=True)
