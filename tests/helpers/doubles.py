"""Transfers that take the engine at its word."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepstow.strategies.engine.transfer.transfer import Event, Lane, Regions, Transfer

Clock = dict[Lane, int]


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

    def _run(self, lane: Lane, work: Callable[[], object]) -> None:
        self._queues[lane].append(work)

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

    def done(self, event: Event | None) -> bool:
        return event is None or event.lane not in self._queues or self._done[event.lane] >= event.number

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


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write of a range of memory; ``what``: the line of code that did it."""

    lane: Lane
    time: int
    start: int
    stop: int
    writes: bool
    what: str
    memory: weakref.ref[Any]


class RaceDetector(Transfer):
    """Copies at once, and checks the order that events alone would give; ``races`` has a line per unordered pair of
    accesses to the same bytes, whatever the timing of the run.

    Each lane has a vector clock (Lamport, 1978): for each lane, how much of its work is known to be done. An event
    stores the clock of its lane; a wait merges it into the clock of the waiting lane. An access races with an earlier
    one if they are on different lanes, have bytes in common, one of them writes, and the clock of the later lane does
    not say that the earlier access is done. Memory that was freed is forgotten: whoever frees memory that lanes may
    still use says so before, by an access.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self._clocks: dict[Lane, Clock] = {lane: defaultdict(int) for lane in Lane}
        self._history: list[Access] = []
        self._lock = threading.RLock()

    def uses(self, lane: Lane, *, reads: Regions = (), writes: Regions = ()) -> None:
        for regions, is_written in ((reads, False), (writes, True)):
            for region in regions:
                self._access(lane, region, writes=is_written)

    def poison(self, lane: Lane, region: Tensor) -> None:
        self.uses(lane, writes=[region])
        super().poison(lane, region)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self.uses(lane, reads=[source], writes=[target])
        super().copy(lane, target, source)

    def _record(self, lane: Lane) -> Clock:
        with self._lock:
            return dict(self._clocks[lane])

    def done(self, event: Event | None) -> bool:
        return True

    def _wait(self, lane: Lane, event: Event) -> None:
        with self._lock:
            known = self._clocks[lane]
            for other, time in event.handle.items():
                known[other] = max(known[other], time)

    def _host_wait(self, event: Event) -> None:
        self._wait(Lane.HOST, event)

    def _access(self, lane: Lane, region: Tensor | None, *, writes: bool) -> None:
        if region is None or region.numel() == 0:
            return
        with self._lock:
            clock = self._clocks[lane]
            clock[lane] += 1
            start = region.data_ptr()
            memory = weakref.ref(region.untyped_storage())
            now = Access(lane, clock[lane], start, start + region.nbytes, writes, _caller(), memory)
            self._history = [old for old in self._history if old.memory() is not None]
            for before in self._history:
                if _conflict(before, now) and clock[before.lane] < before.time:
                    self.races.append(f"{before.what} on {before.lane.value}, then {now.what} on {lane.value}")
            self._history = [old for old in self._history if not _covered(old, now)]
            self._history.append(now)


def _conflict(before: Access, now: Access) -> bool:
    overlap = before.start < now.stop and now.start < before.stop
    return overlap and before.lane is not now.lane and (before.writes or now.writes)


def _covered(old: Access, now: Access) -> bool:
    """Whether what races with ``old`` later races with ``now``, too: same lane, its bytes, a write if it was one."""
    same = old.lane is now.lane and (now.writes or not old.writes)
    return same and now.start <= old.start and old.stop <= now.stop


def _caller() -> str:
    frame: Any = sys._getframe(3)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith("transfer.py"):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"
