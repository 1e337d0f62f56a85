"""Host memory that ranks read of each other: what is seen, what is waited for, and who is given up; one process."""

import os
import subprocess
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepstow.strategies.engine.memory.arena import OutOfMemoryError
from deepstow.strategies.engine.memory.common_host import CommonHost
from deepstow.strategies.engine.ranks.shares import Shares
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer
from tests.helpers import layouts

CPU = torch.device("cpu")


@pytest.fixture
def two() -> tuple[CommonHost, CommonHost]:
    """Two ranks that have mapped each other's memory, as ``connect`` leaves them."""
    first, second = CommonHost(8192, 3, CPU), CommonHost(8192, 3, CPU)
    for one, other, at in ((first, second, 0), (second, first, 1)):
        theirs = one._open(os.getpid(), other._file, other._size, other._token.tolist())
        one._memories = [one._own, theirs] if at == 0 else [theirs, one._own]
        one._processes, one._timeout_s = [os.getpid()] * 2, 60.0
    return first, second


def test_a_reader_waits_for_the_others_and_not_for_itself(two: tuple[CommonHost, CommonHost]) -> None:
    """A late thread's count does not take back what was counted since."""
    first, second = two
    first.wait(1, 0)
    threading.Timer(0.05, second.count, (1, 2)).start()
    first.wait(1, 2)
    second.count(1, 1)
    first.wait(1, 2)
    assert int(first._counts(first._memories[1])[1]) == 2 and not first._counts(first._own).any()


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_for_a_collective(
    two: tuple[CommonHost, CommonHost],
) -> None:
    first, second = two
    second.count(0, 1)
    first._timeout_s = 0.0
    with pytest.raises(dist.DistError, match="Timed out waiting 0 s for the weights of rank 1"):
        first.wait(0, 2)
    ended = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    assert ended.stdout is not None and ended.stdout.read() == b""  # it is about to end, and nobody has asked for that
    first._processes[1], first._timeout_s = ended.pid, 60.0
    for _ in range(2):
        with pytest.raises(dist.DistError, match="rank 1 has ended, and this one waits for its weights"):
            first.wait(0, 2)
        ended.wait()


class Watched(Transfer):
    """Events pass when they are let pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passed, self.waited = threading.Event(), list[Event]()

    def _host_wait(self, event: Event) -> None:
        self.waited.append(event)
        self.passed.wait(60)


def test_what_is_still_copied_is_neither_counted_nor_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, met = Watched(), list[int]()
    one = {"get_world_size": lambda group: 1, "get_rank": lambda group: 0, "get_global_rank": lambda group, rank: 0}
    one |= {
        "all_gather_object": lambda found, mine, group: found.__setitem__(slice(None), [mine]),
        "barrier": lambda group: met.append(len(transfer.waited)),
    }
    for name, instead in one.items():
        monkeypatch.setattr(dist, name, instead)
    whole = layouts.bucket("b", "layers.0", 1024, shards=2, resident_ticks=((0, 1), (1, 2)))
    planned = replace(layouts.layout(whole), common_host=True)
    monkeypatch.setattr(Shares, "_share", lambda self, tensors, device: None)
    how: Any = {"beside": True, "debug": False}
    common: Any = Shares(nn.Module(), None, transfer, CPU, planned, **how)  # type: ignore[arg-type]
    bucket: Any = SimpleNamespace(index=0, replaced=7, sources=[torch.ones(1)])
    common.written(bucket, transfer.record(Stream.DOWN))
    counts = common._common_host._counts(common._common_host._own)
    assert int(counts[0]) == 0
    transfer.passed.set()
    common.close()  # after the thread has done its work
    assert int(counts[0]) == 7
    common.stop_reading()
    assert met == [2] and transfer.waited[1].stream is Stream.UP


def test_too_little_memory_is_said_as_for_any_arena() -> None:
    with pytest.raises(OutOfMemoryError, match=r"the part of the host arena that other ranks read needs 64\.00 TiB"):
        CommonHost(1 << 46, 1, CPU)


def test_a_processor_that_may_reorder_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="aarch64 may reorder writes: write strategies"):
        CommonHost(4096, 1, CPU)
