"""The fake CUDA is as asynchronous and as strict as its README says: who does not wait reads wrong numbers here."""

import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepstow.strategies.engine.memory import accelerator
from tests.helpers import fake_cuda

pytestmark = pytest.mark.skipif(not fake_cuda.is_here(), reason="says what the fake CUDA does: make test-cuda")
DRIVER = accelerator.Driver()
SLOW_US = 200_000
MIB = 1 << 20


@pytest.fixture
def fake() -> Iterator[fake_cuda.Fake]:
    """Its switches, without delays; as they were afterwards."""
    found = fake_cuda.Fake()
    yield found
    found.delay(0, 0)
    found.limit(0)
    torch.cuda.synchronize()


def new_complaints(fake: fake_cuda.Fake, before: dict[str, int]) -> list[str]:
    return [what for what, number in fake.complaints().items() if number > before.get(what, 0)]


def mapped(num_bytes: int = MIB) -> tuple[Any, Tensor]:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def register(host: Tensor) -> str | None:
    """As the engine does."""
    return DRIVER.register(host.data_ptr(), host.numel())


def test_the_host_cannot_touch_device_memory() -> None:
    there = torch.ones(4, device="cuda")
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # its end is expected
        ctypes.string_at(there.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_who_does_not_wait_for_a_copy_reads_old_bytes(fake: fake_cuda.Fake) -> None:
    target, pinned = (
        torch.zeros(MIB, dtype=torch.uint8, device="cuda"),
        torch.full((MIB,), 7, dtype=torch.uint8).pin_memory(),
    )
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    fake.slow(side, SLOW_US)
    with torch.cuda.stream(side):
        target.copy_(pinned, non_blocking=True)
    event.record(side)
    early, passed = target[-1].item(), event.query()
    torch.cuda.current_stream().wait_event(event)
    late = target[-1].item()
    fake.slow(side, 0)
    assert (early, passed, late, event.query()) == (0, False, 7, True)


def test_kernels_are_asynchronous_and_their_errors_come_later(fake: fake_cuda.Fake) -> None:
    fake.slow(torch.cuda.current_stream(), SLOW_US)
    found = torch.ones(3, device="cuda") + 1
    event = torch.cuda.Event()
    event.record()
    assert not event.query(), "the host is ahead"
    torch.index_select(found, 0, torch.tensor([7], device="cuda"))
    fake.slow(torch.cuda.current_stream(), 0)
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.cuda.synchronize()
    assert found.tolist() == [2, 2, 2]


def test_a_kernel_that_the_cpu_has_not_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"a kernel that the CPU has not: .*spin"):
        torch.cuda._sleep(1000)


def test_memory_that_nobody_wrote_is_nan() -> None:
    torch.cuda.empty_cache()
    assert torch.empty(5 * MIB, device="cuda")[: 1 << 20].isnan().all()


def test_memory_ends(fake: fake_cuda.Fake) -> None:
    fake.limit(torch.cuda.memory_allocated() + 64 * MIB)
    held = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()
    assert torch.empty(48 * MIB, dtype=torch.uint8, device="cuda").numel()


def test_registration(fake: fake_cuda.Fake) -> None:
    before = fake.complaints()
    pages, host = mapped(4 * MIB)
    begin, target = host.data_ptr(), torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert register(host[:MIB]) is None is register(host[MIB : 2 * MIB])
    assert "712" in str(register(host[MIB // 2 : MIB])), "twice"
    assert int(torch.cuda.cudart().cudaHostUnregister(begin + 4096)) == 713, "not registered"
    with pytest.raises(RuntimeError, match="713"):
        torch.zeros(1, device="cuda")  # as on a GPU: nobody has asked for that error
    for start in (MIB // 2, 3 * MIB // 2):  # over two registrations, and out of one
        with pytest.raises(RuntimeError, match="partly in registered memory, or in two registrations"):
            target.copy_(host[start : start + MIB], non_blocking=True)
    target.copy_(host[:MIB], non_blocking=True)
    torch.cuda.synchronize()
    for offset in (0, MIB):
        DRIVER.unregister(begin + offset)
    torch.zeros(1, device="cuda")
    assert len(new_complaints(fake, before)) == 3
    del pages


def test_nothing_is_unregistered_under_a_copy(fake: fake_cuda.Fake) -> None:
    pages, host = mapped()
    assert register(host) is None
    target, side = torch.zeros(MIB, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    fake.slow(side, SLOW_US)
    with torch.cuda.stream(side):
        target.copy_(host, non_blocking=True)
    DRIVER.unregister(host.data_ptr())
    with pytest.raises(RuntimeError, match="unregistered under a copy"):
        torch.cuda.synchronize()
    fake.slow(side, 0)
    torch.cuda.synchronize()
    del pages


def test_an_asynchronous_copy_of_pageable_memory_is_said(fake: fake_cuda.Fake) -> None:
    number = fake.complaints().get(fake_cuda.PAGEABLE, 0)
    host = torch.ones(MIB)
    host.to("cuda")
    host.pin_memory().to("cuda", non_blocking=True)
    assert fake.complaints().get(fake_cuda.PAGEABLE, 0) == number
    before = fake.counts()["sync_copies"]
    host.to("cuda", non_blocking=True)
    assert fake.complaints()[fake_cuda.PAGEABLE] == number + 1 and fake.counts()["sync_copies"] == before + 1


def test_what_makes_a_gpu_wait_is_seen_by_torch() -> None:
    values = torch.arange(6.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for wait in (
            values.nonzero,
            lambda: values[values > 2],
            lambda: values[torch.tensor([1])],
            lambda: values.sum().item(),
        ):
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                wait()
        torch.nn.functional.dropout(values, 0.5)
        values.clone().index_add_(0, torch.arange(2, device="cuda"), values[:2]).sort()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_drawn_follows_from_the_generator() -> None:
    def drawn(generator: torch.Generator | None = None) -> list[Tensor]:
        return [torch.randn(5, device="cuda", generator=generator) for _ in range(2)]

    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = drawn()
    torch.cuda.set_rng_state(state)
    assert all(map(torch.equal, first, drawn())) and not torch.equal(*first)
    own = torch.Generator("cuda").manual_seed(4)
    assert not torch.equal(drawn(own)[0], first[0]) and not torch.equal(drawn(own)[0], drawn()[0])


@pytest.mark.parametrize("packed", [False, True])
def test_attention_has_the_bits_of_the_cpu(packed: bool) -> None:
    """In bf16 on the device: flash alone, whose rows may be packed, and whose heads may be groups."""
    ends, sizes = [0, 5, 16], ((4, 32), (2, 32), (2, 32))
    there = [torch.randn(16, *size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    host = [one.detach().cpu().requires_grad_() for one in there]

    def attend(tokens: list[Tensor], begin: int, end: int) -> Tensor:
        q, k, v = (one[begin:end].transpose(0, 1)[None] for one in tokens)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    documents = list(pairwise(ends)) if packed else [(0, 16)]
    expected = torch.cat([attend(host, *document) for document in documents])
    if packed:
        varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
        lengths = torch.tensor(ends, dtype=torch.int32, device="cuda")
        found = varlen(*there, lengths, lengths, 11, 11, window_size=(-1, 0))
    else:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            found = attend(there, 0, 16)
    assert torch.equal(found.cpu(), expected)
    for one in (found, expected):
        one.float().square().sum().backward()
    assert all(torch.allclose(a.grad.cpu(), b.grad, rtol=2e-2, atol=2e-2) for a, b in zip(there, host, strict=True))  # type: ignore[union-attr, arg-type]


def run(module: str, **environment: str) -> None:
    """A script in a process of its own, since it has other devices."""
    done = subprocess.run(
        [sys.executable, "-m", module], check=False, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_devices_in_one_process() -> None:
    run("tests.cuda.two_devices", FAKE_CUDA_DEVICES="2")


def test_segments_that_expand() -> None:
    run("tests.cuda.expanding", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def test_collectives_of_one_rank() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.arange(4.0, device="cuda")
        found = torch.empty_like(values)
        dist.all_reduce(values)
        dist.all_gather_into_tensor(found, values)
        assert found.tolist() == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()
