"""The worker: one thread of this process that runs host updates, the most urgent first, without the GIL.

Torch's kernels release the GIL, so the worker computes beside Python. No child process: nothing to copy, to start, to
time out or to leave behind. Work is taken in order of priority (a bucket's place in forward), because the next forward
needs the first buckets first, whatever order backward finished them in.

Threads. The kernels of an update use the cores that are left: all but one, which Python and the data loader need, on a
machine where another device computes. ``torch.set_num_threads`` in a thread holds for that thread, but becomes the
default of threads that start later; so the thread that made the worker says its own number again.

Where the device is the CPU itself there is nobody to compute beside, and a second team of threads on the same cores
costs more than it brings (benchmarks/records/2026-11-21_cpu-update_2-core): work is done when it is submitted.

Source of the priority: AutoHete (arXiv 2503.01890) reports 1.16 to 1.21 times the speed from it alone.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Worker:
    """Runs submitted work in one thread; equal priorities in order of submission.

    Args:
        threads: that the kernels of an update may use; None: work is done in the caller's thread, at once.
        device: whose events are waited for; each thread begins with the first one of the machine.
    """

    def __init__(self, threads: int | None, device: torch.device | None = None) -> None:
        self._waiting: list[tuple[int, int, Callable[[], Any], Future[Any]]] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._thread: ThreadPoolExecutor | None = None
        if threads is not None:
            mine = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stow-update")
            self._thread.submit(_use, threads, device).result()
            torch.set_num_threads(mine)

    def submit(self, priority: int, work: Callable[[], T]) -> Future[T]:
        """``work`` will run; the future has its result or its error."""
        future: Future[T] = Future()
        with self._lock:
            heapq.heappush(self._waiting, (priority, next(self._numbers), work, future))
        if self._thread is None:
            self._run_most_urgent()
        else:
            self._thread.submit(self._run_most_urgent)
        return future

    def _run_most_urgent(self) -> None:
        with self._lock:
            _, _, work, future = heapq.heappop(self._waiting)
        try:
            future.set_result(work())
        except BaseException as error:  # the one who waits for it raises it
            future.set_exception(error)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)


def spare_cores() -> int:
    """Cores of this process less the one that Python needs."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _use(threads: int, device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)
    torch.get_num_threads()  # when first asked a thread takes the process's number; only after that its own counts
    torch.set_num_threads(threads)
