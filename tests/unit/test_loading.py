"""Processes that load batches, real ones: of each thing that can go wrong with them the run hears, in one line."""

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from deepstow.trainer.errors import ExitCode
from deepstow.trainer.run import loading
from tests.helpers.tiny import LLAMA, run_config


def collated(rows: list[Any]) -> BatchEncoding:
    return BatchEncoding({"input_ids": torch.tensor(rows), "labels": [torch.tensor(rows)]})


class Rows:
    """Eight of them; ``does`` is done in the loading process before the third."""

    def __init__(self, does: Callable[[], None]) -> None:
        self._does = does

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        if index == 2:
            self._does()
        return [index] * 4096


def shared_memory_is_full() -> None:
    """For this process: nothing can be put into it any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def signals_then_full() -> None:
    """A closed terminal, Ctrl-C, and what DeepSpeed's launcher sends come to loading processes, too."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    shared_memory_is_full()


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        (shared_memory_is_full, ExitCode.DISK, "/dev/shm, through which batches come, is full (RuntimeError: una"),
        (signals_then_full, ExitCode.DISK, " is full ("),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ExitCode.PEER_DIED, "has died, out of memory? (DataLoader w"),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), ExitCode.WATCHDOG, "gave no sign of life (DataLoader timed out"),
    ],
    ids=["full", "signals", "killed", "stopped"],
)  # fmt: skip
def test_nothing_is_waited_for_without_end(does: Callable[[], None], code: ExitCode, said: str) -> None:
    rows: Any = Rows(does)
    loader: Any = DataLoader(rows, batch_size=1, collate_fn=collated, num_workers=1, prefetch_factor=1)
    loading.guard(loader, 6.0)
    batches = iter(loader)
    for index in range(2):
        batch = next(batches)
        assert batch["input_ids"].is_shared() and batch["labels"][0].is_shared()
        assert batch["input_ids"].tolist() == [[index] * 4096]
    began_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    assert code is ExitCode.WATCHDOG or time.monotonic() - began_s < 6.0
    found = loading.explained(caught.value)
    assert found is not None and found[0] == code and said in found[1] and found[1].count("\n") == 0
    assert found[1].startswith("training.dataloader_num_workers: ") and "dataloader_num_workers: 0 loads" in found[1]
    former, left = signal.getsignal(signal.SIGCHLD), multiprocessing.active_children()
    loading.end_all()
    for each in left:
        each.join(20.0)
    assert not multiprocessing.active_children(), "a process that is stopped keeps the run from ending"
    signal.signal(signal.SIGCHLD, former)


def test_one_that_is_stopped_is_seen() -> None:
    """Also where it has announced a batch already, for which torch would wait."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    lines: list[str] = []
    with loading.watched(run_config(LLAMA, dataloader_num_workers=1), 0.4, lines.append):
        time.sleep(0.8)
        assert lines == []
        os.kill(pid, signal.SIGSTOP)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        deadline_s = time.monotonic() + 20.0
        while not lines:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert len(lines) == 1 and "a process that loads batches was stopped for 0 s; " in lines[0]


def test_what_is_said_before() -> None:
    """By a run whose batches may not find room; none of one that loads them itself."""
    small: dict[str, Any] = {"output_dir": "run", "gradient_accumulation_steps": 1}
    assert loading.shortage(run_config(LLAMA, **small, dataloader_num_workers=1), 1) is None
    assert loading.shortage(run_config(LLAMA, **small, per_device_train_batch_size=10**12), 2) is None
    large = run_config(LLAMA, **small, dataloader_num_workers=2, per_device_train_batch_size=10**9)
    line = loading.shortage(large, 3)
    assert line is not None and "6 loading processes may put " in line and " into /dev/shm, which has " in line


def test_other_errors_are_not_explained() -> None:
    for error in (RuntimeError("shape"), OSError(28, "No space", "/a/file"), ValueError("DataLoader timed out")):
        assert loading.explained(error) is None
