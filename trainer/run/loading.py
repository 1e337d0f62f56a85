"""Processes that load batches (``training.dataloader_num_workers``): what goes wrong there ends the run in one line.

Batches come through ``/dev/shm``. Torch moves them there in a thread of the loading process that nobody hears of: where
there is no room the batch is lost, and the run waits for it without end. So our collator moves them, in the place where
an error is sent to the run. A loading process that dies is noticed by torch. For one whose disk does not answer the run
waits ``training.ddp_timeout``, as for another rank. One that is stopped does not give a batch that it has announced,
and for that torch waits without end; so a thread looks whether one is.

Invariant. A batch that is shared has its own bytes; torch then sends it as it is, and copies it no second time.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from torch import Tensor
from torch.utils.data import get_worker_info

from deepstow.strategies.core.sizes import human
from deepstow.trainer.errors import ExitCode, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from deepstow.trainer.config.sections import RunConfig

SHARED = Path("/dev/shm")
LOOK_S, LOOKS = 30.0, 8  # between two looks at loading processes, and at least so many per timeout
AHEAD = 2  # batches that a process prepares, if the config says nothing
TENSORS, BYTES = 3, 8  # of a row of tokens: inputs, labels, mask; per token
KEY = "training.dataloader_num_workers"
FEWER = f"{KEY}: 0 loads in the run itself"
LARGER = f"make {SHARED} larger (docker run --shm-size=8g, or --ipc=host), or load with fewer processes: {FEWER}"
# What torch says, with the code that the run ends with, and the cure.
FULL = f"{SHARED}, through which batches come, is full"
SAID = (
    ("</torch_", ExitCode.DISK, FULL, LARGER),  # the file of a tensor there, whatever could not be done with it
    ("insufficient shared memory", ExitCode.DISK, FULL, LARGER),
    ("workers are out of shared memory", ExitCode.DISK, FULL, LARGER),
    ("DataLoader timed out", ExitCode.WATCHDOG, "a process that loads batches gave no sign of life", FEWER),
    ("DataLoader worker (pid", ExitCode.PEER_DIED, "a process that loads batches has died, out of memory?", FEWER),
)


class Shared:
    """A collator whose batches lie where the run can read them, if a loading process makes them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self._collate(rows)
        if get_worker_info() is not None:
            _share(batch)
        return batch


def _share(value: Any) -> None:
    """Move the tensors of a batch. Raise RuntimeError if there is no room."""
    if isinstance(value, Tensor):
        value.share_memory_()
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _share(item)


def guard(loader: DataLoader[Any], timeout_s: float) -> None:
    """Let ``loader``, before its first batch, end the run instead of waiting longer than ``timeout_s``."""
    if loader.num_workers == 0 or isinstance(loader.collate_fn, Shared):
        return
    loader.timeout = timeout_s
    loader.collate_fn = Shared(loader.collate_fn)
    loader.worker_init_fn = partial(_begin, loader.worker_init_fn)


def _begin(then: Callable[[int], None] | None, number: int) -> None:
    """In a loading process. A terminal's signals go to all, and so does SIGTERM from DeepSpeed's launcher; without its
    loaders a run cannot finish the step. They end with it: torch asks them to, or they see that it is gone.
    """
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    if then is not None:
        then(number)


def shortage(config: RunConfig, num_ranks: int) -> str | None:
    """A line if ``/dev/shm`` has less room than the loading processes of this machine's ranks may need; None if it is
    enough, or not known.
    """
    training, data = config.training, config.data
    processes = training.dataloader_num_workers or 0
    pages = -(-training.per_device_train_batch_size * data.max_length * BYTES // PAGESIZE)  # of a tensor
    batches = processes * (training.dataloader_prefetch_factor or AHEAD) + training.gradient_accumulation_steps
    needed = num_ranks * batches * TENSORS * pages * PAGESIZE if processes else 0
    free = _free()
    if free is None or needed <= free:
        return None
    what = f"{num_ranks * processes} loading processes may put {human(needed)} into {SHARED}, which has {human(free)}"
    return f"{KEY} = {processes}: {what}; if it is full the run ends: {LARGER}"


@contextmanager
def watched(config: RunConfig, timeout_s: float, end: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``end`` is called with a line, from another thread, if a loading process is stopped for so long."""
    over = threading.Event()
    if config.training.dataloader_num_workers:
        threading.Thread(target=_watch, args=(timeout_s, over, end), name="loading", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(timeout_s: float, over: threading.Event, end: Callable[[str], None]) -> None:
    since_s: dict[psutil.Process, float] = {}
    while not over.wait(min(LOOK_S, timeout_s / LOOKS)):
        now_s = time.monotonic()
        since_s = {child: since_s.get(child, now_s) for child in psutil.Process().children() if _is_stopped(child)}
        if since_s and now_s - min(since_s.values()) >= timeout_s:
            for child in since_s:
                child.kill()  # it would be left behind
            end(f"{KEY}: a process that loads batches was stopped for {timeout_s:.0f} s; {FEWER}")
            return


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has just ended
        return False


def end_all() -> None:
    """Kill the loading processes that are left: one that is stopped would keep this one from ending."""
    if children := multiprocessing.active_children():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error, wherever this process is
    for child in children:
        child.kill()


def _free() -> int | None:
    """Bytes that ``/dev/shm`` has room for; None if that cannot be known."""
    try:
        stats = os.statvfs(SHARED)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def explained(error: Exception) -> tuple[ExitCode, str] | None:
    """The exit code and the line for what goes wrong with loading processes; None if it is something else."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None and _free() == 0:
        return ExitCode.DISK, f"{KEY}: {FULL} ({first_line(error)}); {LARGER}"  # a semaphore lies there, too
    if isinstance(error, RuntimeError):
        for line in str(error).splitlines():
            for words, code, what, cure in SAID:
                if words in line:
                    return code, f"{KEY}: {what} ({line.strip()}); {cure}"
    return None
