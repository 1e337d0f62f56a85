"""How the runtime calls a device, beside what it computes there."""

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.engine import stow
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer, Event, Stream
from deepstow.strategies.engine.transfer.worker import Worker
from deepstow.strategies.engine.updating.norms import together
from deepstow.trainer.machine.block_timing import UnitClock
from deepstow.trainer.machine.probe import probe
from tests.accelerator import chosen
from tests.helpers import sides
from tests.helpers.engine import plan_of
from tests.helpers.models import build

SLOW_US = 200_000


@pytest.mark.simulated("names its device")
def test_the_table_and_what_torch_says(there: torch.device) -> None:
    assert accelerator.kind() == "sim" and accelerator.current() == there == accelerator.device_of(None)
    assert accelerator.device_of("sim") == there and accelerator.device_of("cpu") == torch.device("cpu")
    assert accelerator.name_of(there) == "simulated device"
    assert accelerator.row_of(torch.device("xpu")).driver is None
    found = probe()
    assert (found.device_kind, found.name) == ("sim", "simulated device")
    assert found.device_total_bytes == torch.accelerator.get_memory_info()[1]


def test_a_device_that_lags_behind_is_waited_for(device: Any, there: torch.device) -> None:
    device.delay(0, SLOW_US)
    model = nn.Sequential(nn.Linear(2, 2)).to(there)
    clock = UnitClock(model, {"block": model[0]}, there)
    x = torch.ones(1, 2, device=there, requires_grad=True) * 1
    with clock.timing():
        model(x).sum().backward()
    seconds = clock.seconds()
    assert seconds is not None and min(seconds.block) > 0


def test_who_waits_for_an_event_sleeps(device: Any, there: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """``synchronize`` would keep a core busy, which the worker's kernels need."""
    transfer, naps = AcceleratorTransfer(there), []
    monkeypatch.setattr("deepstow.strategies.engine.transfer.transfer.time.sleep", naps.append)
    busy = torch.randn(400, 400, device=there)
    for _ in range(20):
        busy = busy @ busy
    transfer.host_wait(transfer.record(Stream.COMPUTE))
    assert naps


def test_compute_is_one_stream(there: torch.device) -> None:
    transfer = AcceleratorTransfer(there)
    transfer.record(Stream.COMPUTE)
    with torch.Stream(device=there), pytest.raises(RuntimeError, match="runs on the stream on which it first ran"):
        transfer.record(Stream.COMPUTE)


def test_threads_keep_their_streams(there: torch.device) -> None:
    """One is inside of a stream while another enters and leaves it: both end on the stream on which they began."""
    transfer, inside, left = AcceleratorTransfer(there), threading.Event(), threading.Event()
    ended: list[torch.Stream] = []

    def other() -> None:
        mine = torch.Stream(device=there)
        torch.accelerator.set_stream(mine)
        with transfer.on(Stream.UP):
            inside.set()
            left.wait(10)
        ended.extend([mine, torch.accelerator.current_stream(there)])

    began = torch.accelerator.current_stream(there)
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with transfer.on(Stream.UP):
        assert torch.accelerator.current_stream(there) != began
    assert torch.accelerator.current_stream(there) == began
    left.set()
    thread.join()
    assert ended[0] == ended[1]


def test_poison_is_on_the_stream_that_overwrites_it(device: Any, there: torch.device) -> None:
    transfer, region = AcceleratorTransfer(there), torch.zeros(1000, device=there)
    torch.accelerator.synchronize()
    pages = torch.ones(1000, pin_memory=True)
    for _ in range(20):  # in another order one of them would end as NaN
        transfer.poison(Stream.UP, region)
        transfer.copy(Stream.UP, region, pages)
        transfer.wait(Stream.COMPUTE, transfer.record(Stream.UP))
        assert bool((region == 1).all())
        transfer.wait(Stream.UP, transfer.record(Stream.COMPUTE))


def test_the_worker_sets_its_device(there: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread begins with the first device of the machine."""
    seen: list[Any] = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda device: seen.append((threading.current_thread(), device))
    )
    worker = Worker(1, there)
    thread = worker.submit(0, threading.current_thread).result()
    worker.close()
    assert seen == [(thread, there)]


def test_norms_from_the_host_go_up_together(device: Any, there: torch.device) -> None:
    norms = [torch.tensor(float(number)) for number in range(5)]
    before = device.counts()
    found = together(norms, there)
    after = device.counts()
    assert after["async_copies"] - before["async_copies"] == 1 and after["sync_copies"] == before["sync_copies"]
    assert [value.item() for value in found] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_moments_are_touched_by_the_threads_that_update_them(
    there: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the driver, which would put all pages beside the core that asks for them to be pinned."""
    driver, pages = accelerator.row_of(there).driver, []
    register = driver.register
    monkeypatch.setattr(driver, "register", lambda at, size: pages.append(resident(at)) or register(at, size))
    model = build("llama")
    plan: Any = plan_of(model, **sides.LAYOUTS["host, one ahead"])
    moments = sum(8 * bucket.share for bucket in plan.layout.buckets)
    optimizer = stow(model, plan, device=there)
    assert sum(pages) > moments > 0, "weights, which moved in before, are half as many"
    optimizer.close()


def resident(address: int) -> int:
    """Bytes in memory of the mapping that begins at ``address``."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) << 10 for line in lines[begin:] if line.startswith("Rss:"))


class Watched(AcceleratorTransfer):
    """Knows the events that were recorded, and counts those that the thread of the loop waits for; the worker's waits
    are its own affair: it sleeps.
    """

    def __init__(self) -> None:
        super().__init__(sides.ground.device)
        self.waited, self.events = 0, dict[int, Any]()

    def _record(self, stream: Stream) -> Any:
        event = super()._record(stream)
        self.events[id(event)] = event
        return event

    def host_wait(self, *events: Event | None) -> None:
        self.waited += threading.current_thread() is threading.main_thread()
        super().host_wait(*events)


def grown(device: Any, layout: str, *, fused: bool, norm: float = 0.5, accumulation: int = 1) -> list[tuple[int, int]]:
    """In each of some steps, after two that warm up: copies and events that the loop waited for, and new events."""
    model, moves, found = build("llama"), Watched(), [(0, 0)]
    optimizer = sides.stowed(model, layout, fused, moves, max_norm=norm, accumulation=accumulation, debug=False)
    batches = [{name: value.to(chosen.kind) for name, value in batch.items()} for batch in sides.BATCHES[:accumulation]]
    for _ in range(5):
        for batch in batches:
            model(**batch).loss.backward()
        if norm:
            optimizer.clip_grad_norm_(norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((device.counts()["sync_copies"] + moves.waited, len(moves.events)))
    optimizer.close()
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(found)][2:]


def test_an_event_that_somebody_holds_is_not_used_again(there: torch.device) -> None:
    transfer = AcceleratorTransfer(there)
    held = transfer.record(Stream.UP)
    handle = held.handle
    assert transfer.record(Stream.DOWN).handle is not handle
    del held
    assert transfer.record(Stream.DOWN).handle is handle


@pytest.mark.parametrize(("norm", "accumulation"), [(0.0, 1), (0.5, 2)])
@pytest.mark.parametrize("layout", sides.LAYOUTS)
@pytest.mark.usefixtures("there")
def test_nobody_waits_within_a_step(layout: str, norm: float, accumulation: int, device: Any) -> None:
    """Copies of pageable memory make the host wait, and so do numbers that it asks for. A step needs no more events
    than the one before; in one or another the worker may let go of its own later.
    """
    waited, events = zip(*grown(device, layout, fused=True, norm=norm, accumulation=accumulation), strict=True)
    assert sum(waited) == 0 == min(events)


@pytest.mark.usefixtures("there")
def test_what_waits_is_counted(device: Any) -> None:
    """Torch's kernel that is not fused asks for its counts one by one."""
    assert sum(waited for waited, _ in grown(device, "device, resident", fused=False)) > 0
