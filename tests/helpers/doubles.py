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

from deepstow.strategies.engine.transfer.transfer import Event, Regions, Stream, Transfer

Clock = dict[Stream, int]


class Delayed(Transfer):
    """Copies made as late as their events allow: code that forgets to wait reads old bytes. Compute and the host are
    immediate; each copy stream is a queue that runs only as far as something waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[Stream, deque[Callable[[], object]]] = {Stream.UP: deque(), Stream.DOWN: deque()}
        self._done: dict[Stream, int] = {Stream.UP: 0, Stream.DOWN: 0}
        self._lock = threading.RLock()  # the worker waits, too

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        self._queues[stream].append(lambda: target.copy_(source))

    def _run(self, stream: Stream, work: Callable[[], object]) -> None:
        self._queues[stream].append(work)

    def poison(self, stream: Stream, region: Tensor) -> None:
        self._queues[stream].append(lambda: region.fill_(math.nan))

    def _record(self, stream: Stream) -> None:
        if stream in self._queues:
            number = self._count[stream]
            self._queues[stream].append(lambda: self._done.__setitem__(stream, number))

    def _wait(self, stream: Stream, event: Event) -> None:
        if stream in self._queues:
            self._queues[stream].append(lambda: self._host_wait(event))
        else:
            self._host_wait(event)

    def done(self, event: Event | None) -> bool:
        return event is None or event.stream not in self._queues or self._done[event.stream] >= event.number

    def _host_wait(self, event: Event) -> None:
        with self._lock:
            while event.stream in self._queues and self._done[event.stream] < event.number:
                self._queues[event.stream].popleft()()


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

    stream: Stream
    time: int
    start: int
    stop: int
    writes: bool
    what: str
    memory: weakref.ref[Any]


class RaceDetector(Transfer):
    """Copies at once, and checks the order that events alone would give; ``races`` has a line per unordered pair of
    accesses to the same bytes, whatever the timing of the run.

    Each stream has a vector clock (Lamport, 1978): for each stream, how much of its work is known to be done. An event
    stores the clock of its stream; a wait merges it into that of the waiting stream. An access races with an earlier
    one if they are on different streams, have bytes in common, one of them writes, and the clock of the later does not
    say that the earlier access is done. Memory that was freed is forgotten: whoever frees memory that streams may
    still use says so before, by an access.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self._clocks: dict[Stream, Clock] = {stream: defaultdict(int) for stream in Stream}
        self._history: list[Access] = []
        self._lock = threading.RLock()

    def uses(self, stream: Stream, *, reads: Regions = (), writes: Regions = ()) -> None:
        for regions, is_written in ((reads, False), (writes, True)):
            for region in regions:
                self._access(stream, region, writes=is_written)

    def poison(self, stream: Stream, region: Tensor) -> None:
        self.uses(stream, writes=[region])
        super().poison(stream, region)

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        self.uses(stream, reads=[source], writes=[target])
        super().copy(stream, target, source)

    def _record(self, stream: Stream) -> Clock:
        with self._lock:
            return dict(self._clocks[stream])

    def done(self, event: Event | None) -> bool:
        return True

    def _wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            known = self._clocks[stream]
            for other, time in event.handle.items():
                known[other] = max(known[other], time)

    def _host_wait(self, event: Event) -> None:
        self._wait(Stream.HOST, event)

    def _access(self, stream: Stream, region: Tensor | None, *, writes: bool) -> None:
        if region is None or region.numel() == 0:
            return
        with self._lock:
            clock = self._clocks[stream]
            clock[stream] += 1
            start = region.data_ptr()
            memory = weakref.ref(region.untyped_storage())
            now = Access(stream, clock[stream], start, start + region.nbytes, writes, _caller(), memory)
            self._history = [old for old in self._history if old.memory() is not None]
            for before in self._history:
                if _conflict(before, now) and clock[before.stream] < before.time:
                    self.races.append(f"{before.what} on {before.stream.value}, then {now.what} on {stream.value}")
            self._history = [old for old in self._history if not _covered(old, now)]
            self._history.append(now)


def _conflict(before: Access, now: Access) -> bool:
    overlap = before.start < now.stop and now.start < before.stop
    return overlap and before.stream is not now.stream and (before.writes or now.writes)


def _covered(old: Access, now: Access) -> bool:
    """Whether what races with ``old`` later races with ``now``, too: same stream, its bytes, a write if it was one."""
    same = old.stream is now.stream and (now.writes or not old.writes)
    return same and now.start <= old.start and old.stop <= now.stop


def _caller() -> str:
    frame: Any = sys._getframe(3)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith("transfer.py"):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"
