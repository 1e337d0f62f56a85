"""Host memory that is pinned: registrations that no copy lies in two of, and that end with the memory."""

import faulthandler
import gc
import os

import pytest
import torch

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import PAGE_BYTES
from deepstow.strategies.engine.forward.activations import HostRoom, arena_of_saved
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory import arena as module
from deepstow.strategies.engine.memory.arena import Arena, HostMemory, OutOfMemoryError
from deepstow.strategies.planner.addresses import place
from tests.helpers.layouts import bucket, layout

CPU = torch.device("cpu")
PIECE = 16 * PAGE_BYTES


class Driver:
    """Keeps what CUDA keeps: no page twice, and nothing that is not registered is given up."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.calls, self.refuses = 0, 0  # the number of the call that fails

    def register(self, pointer: int, num_bytes: int) -> str | None:
        self.calls += 1
        end = -(-(pointer + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        if self.calls == self.refuses:
            return "no more (CUDA error 2)"
        if any(
            start < end and pointer // PAGE_BYTES * PAGE_BYTES < start + size for start, size in self.ranges.items()
        ):
            return "already registered (CUDA error 712)"
        self.ranges[pointer] = end - pointer
        return None

    def unregister(self, pointer: int) -> None:
        del self.ranges[pointer]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Of the CPU, which has none of its own."""
    found = Driver()
    monkeypatch.setitem(accelerator.TABLE, "cpu", accelerator.Row(found))
    return found


def host_memory() -> HostMemory:
    return HostMemory(5 * PIECE, CPU, "a test")


def hosted() -> Arena:
    """Stretches of odd sizes, one larger than a piece."""
    sizes = [900, 7000, 128, 33000, 5000, 12000, 700, 9000]
    made = layout(*(bucket(f"b{i}", f"layers.{i}", size, resident_ticks=((i, i + 1),)) for i, size in enumerate(sizes)))
    return Arena(place(made), CPU)


def test_no_stretch_lies_in_two_registrations(driver: Driver) -> None:
    arena = hosted()
    spots = [spot for spot in arena.addresses.spots.values() if spot.tier is Tier.HOST]
    arena.pin()
    start = arena._host.memory.data_ptr()
    assert len(driver.ranges) > 2 and sum(size > PIECE for size in driver.ranges.values()) <= 2
    for spot in spots:
        inside = [p for p, size in driver.ranges.items() if p <= start + spot.offset and start + spot.end <= p + size]
        assert len(inside) == 1, spot
    assert any(
        spot.offset < border < spot.end for spot in spots for border in range(PIECE, arena.num_bytes(Tier.HOST), PIECE)
    )


def test_registrations_end_with_the_memory(driver: Driver) -> None:
    """Also after an error, when nobody calls ``close``."""
    pages = host_memory()
    pages.pin(range(0, 5 * PIECE, PIECE))
    assert len(driver.ranges) == 5
    view = pages.memory[:8]
    del pages
    gc.collect()
    assert driver.ranges == {} and view.sum() == 0


def test_a_refusal_names_the_error_and_leaves_nothing(driver: Driver) -> None:
    driver.refuses = 3
    with pytest.raises(OutOfMemoryError, match=r"could not pin .* for a test: no more \(CUDA error 2\)"):
        host_memory().pin(range(0, 5 * PIECE, PIECE))
    assert driver.ranges == {}


def test_a_forked_process_has_none_of_it(driver: Driver) -> None:
    """What is pinned would be shared with it until somebody writes, and then by whom is chance."""
    pages = host_memory()
    pages.pin(())
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # what comes is no surprise
        pages.memory[0] = 1  # ends it: there is no memory
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0


def test_slots_of_saved_tensors_keep_to_borders(driver: Driver) -> None:
    room = HostRoom([], arena_of_saved(4 * PIECE, CPU))
    assert len(driver.ranges) == 4
    saved = torch.empty(PIECE * 5 // 8, dtype=torch.uint8)
    sent = [room.send(saved) for _ in range(5)]
    places = [each.memory.data_ptr() - min(driver.ranges) for each in sent if each is not None]
    assert places == [0, PIECE, 2 * PIECE, 3 * PIECE] and sent[4] is None


def test_a_device_without_streams_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's: the CPU is taken."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert accelerator.kind() is None and accelerator.device_of(None) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device='mps': this machine has cpu$"):
        accelerator.device_of("mps")
