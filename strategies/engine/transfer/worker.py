"""The worker: one thread of this process that runs host updates, the most urgent first, beside Python.

Work is taken in order of priority (a bucket's position in forward), because the next forward needs the first buckets
first, whatever order backward finished them in. The kernels of an update use all cores but one, which Python and the
data loader need. ``torch.set_num_threads`` in a thread holds for that thread, but becomes the default of threads that
start later; so the thread that made the worker sets its own number again. If the device is the CPU itself, a second
team of threads costs more than it gains (benchmarks/records/cpu-update.md): work runs when submitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import PriorityQueue
from typing import Any, TypeVar

import torch

from deepstow.strategies.core.cgroups import ROOT, usable_cores

T = TypeVar("T")


class Worker:
    """Runs submitted work in one thread; equal priorities in order of submission.

    ``threads`` are for the kernels of an update; None: work runs in the caller's thread, at once. ``device``: whose
    events the work waits for; a new thread would use the machine's first one.
    """

    def __init__(self, threads: int | None, device: torch.device | None = None) -> None:
        self._waiting: PriorityQueue[tuple[int, int, Callable[[], Any], Future[Any]]] = PriorityQueue()
        self._numbers = itertools.count()
        self._thread: ThreadPoolExecutor | None = None
        if threads is not None:
            mine = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stow-update")
            self._thread.submit(_use, threads, device).result()
            torch.set_num_threads(mine)

    def submit(self, priority: int, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` later, unless it is cancelled; the future has its result or its error."""
        future: Future[T] = Future()
        self._waiting.put((priority, next(self._numbers), work, future))
        if self._thread is None:
            self._run_most_urgent()
        else:
            self._thread.submit(self._run_most_urgent)
        return future

    def _run_most_urgent(self) -> None:
        _, _, work, future = self._waiting.get()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # ``future.result()`` raises it
            future.set_exception(error)

    def close(self) -> None:
        """Finish all submitted work and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)


def spare_cores(root: Path = ROOT) -> int:
    """The cores that this process may use, less one for Python; ``root`` as for ``usable_cores``."""
    return max(1, usable_cores(root) - 1)


def _use(threads: int, device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)
    torch.get_num_threads()  # the first call gives a thread the process's number; only then can it be set
    torch.set_num_threads(threads)
