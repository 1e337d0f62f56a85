"""Executors: one does nothing until somebody waits for it, so what is not awaited has not happened; one all at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Late(Executor):
    """A thread's queue that runs, in order, only as far as a result is asked for: as late as that allows."""

    def __init__(self, name: str = "") -> None:
        self._queue: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._lock = threading.RLock()

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Future[Any]:
        future = _Awaited(self)
        self._queue.append((future, lambda: work(*given, **named)))
        return future

    def run_until(self, wanted: Future[Any]) -> None:
        with self._lock:
            while not wanted.done():
                future, work = self._queue.popleft()
                future.set_result(work())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What is left is never done."""


class _Awaited(Future[Any]):
    def __init__(self, late: Late) -> None:
        super().__init__()
        self._late = late

    def result(self, timeout: float | None = None) -> Any:
        self._late.run_until(self)
        return super().result(timeout)


class Early(Executor):
    """A thread's queue that is always empty: what it is given is done at once."""

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*given, **named))
        return done
