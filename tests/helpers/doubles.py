"""Transfers that take the engine at its word."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from strategies.engine.transfer.transfer import Event, Lane, Transfer


class Delayed(Transfer):
    """Copies made as late as their events allow: code that forgets to wait reads old bytes. Compute and the host are
    immediate; each copy lane is a queue that runs only as far as something waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[Lane, deque[Callable[[], object]]] = {Lane.UP: deque(), Lane.DOWN: deque()}
        self._done: dict[Lane, int] = {Lane.UP: 0, Lane.DOWN: 0}
        self._lock = threading.RLock()  # the worker waits, too

    def _copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self._queues[lane].append(lambda: target.copy_(source))

    def poison(self, lane: Lane, region: Tensor) -> None:
        self._queues[lane].append(lambda: region.fill_(math.nan))

    def _record(self, lane: Lane) -> None:
        if lane in self._queues:
            number = self._count[lane]
            self._queues[lane].append(lambda: self._done.__setitem__(lane, number))

    def _wait(self, lane: Lane, event: Event) -> None:
        if lane in self._queues:
            self._queues[lane].append(lambda: self._host_wait(event))
        else:
            self._host_wait(event)

    def _host_wait(self, event: Event) -> None:
        with self._lock:
            while event.lane in self._queues and self._done[event.lane] < event.number:
                self._queues[event.lane].popleft()()


class Vacant(Delayed):
    """A home is NaN from the moment it is given up, and it is given up as soon as it is left.

    ``Delayed`` brings the next tenant as late as it may, so that a reader who comes after the border often finds the
    old bytes still there. Nobody finds anything here.
    """

    eager = True

    def vacated(self, home: Tensor, *after: Event | None) -> None:
        self.host_wait(*after)
        home.fill_(math.nan)
