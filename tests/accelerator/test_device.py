"""The simulated accelerator is as asynchronous and as strict as it says: who does not wait reads wrong numbers here."""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.simulated("what it does; of the fake CUDA tests/cuda/test_fake.py says it")
SLOW_US = 200_000
MIB = 1 << 20


def mapped(num_bytes: int = MIB) -> tuple[Any, Tensor]:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


@pytest.fixture
def pinned(device: Any) -> Any:
    """A registered mapping full of sevens."""
    pages, host = mapped()
    assert device.host_register(host.data_ptr(), host.numel()) == 0
    host.fill_(7)
    yield host
    torch.accelerator.synchronize()
    device.host_unregister(host.data_ptr())
    del host, pages


def test_who_does_not_wait_for_a_copy_reads_old_bytes(device: Any, pinned: Tensor) -> None:
    target = torch.zeros(MIB, dtype=torch.uint8, device="sim")
    torch.accelerator.synchronize()
    device.delay(SLOW_US, 0)
    side, event = torch.Stream(device="sim"), torch.Event(device="sim")
    early = late = 0
    for _ in range(5):  # a delay is random, and may be short
        target.zero_()
        torch.accelerator.synchronize()
        with side:
            target.copy_(pinned, non_blocking=True)
        event.record(side)
        early += int(target[-1].item() == 7)
        torch.accelerator.current_stream().wait_event(event)
        late += int(target[-1].item() == 7)
    assert early < 5 and late == 5 and event.query()


def test_kernels_are_asynchronous(device: Any) -> None:
    a = torch.randn(600, 600, device="sim")
    torch.accelerator.synchronize()
    before = device.counts()
    for _ in range(20):
        b = a @ a
    event = torch.Event(device="sim")
    event.record()
    assert not event.query(), "the host is ahead"
    event.synchronize()
    found = device.counts()
    assert found["async_kernels"] - before["async_kernels"] == 20 and found["sync_kernels"] == before["sync_kernels"]
    assert torch.equal(b, a @ a)


def test_memory_is_given_out_again_at_once_and_is_nan_between(device: Any) -> None:
    device.delay(0, 0)
    first = torch.ones(1000, device="sim")
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device="sim")
    assert second.data_ptr() == address and second.isnan().all()
    other = torch.Stream(device="sim")
    with other:
        assert torch.empty(1000, device="sim").data_ptr() != address, "each stream has its own"


def test_nothing_is_unregistered_under_a_copy(device: Any) -> None:
    """By a stream that is slow, and has not begun."""
    pages, host = mapped()
    assert device.host_register(host.data_ptr(), MIB) == 0
    target, side = torch.zeros(MIB, dtype=torch.uint8, device="sim"), torch.Stream(device="sim")
    torch.accelerator.synchronize()
    device.delay(0, 0)
    device.slow(side.stream_id, SLOW_US)
    with side:
        target.copy_(host, non_blocking=True)
    assert device.host_unregister(host.data_ptr()) == 0
    with pytest.raises(RuntimeError, match="unregistered under a copy"):
        torch.accelerator.synchronize()
    device.slow(side.stream_id, 0)
    del pages


def test_an_error_in_a_kernel_comes_later(device: Any) -> None:
    table = torch.ones(3, 2, device="sim")
    torch.index_select(table, 0, torch.tensor([7], device="sim"))
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.accelerator.synchronize()
