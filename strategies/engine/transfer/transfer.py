"""Copies between the homes, and the only streams and events of the project.

Five streams: the device computes (COMPUTE), copies up (UP), copies down (DOWN), exchanges with other ranks (NET); the
worker on the host computes (HOST).
Invariant. Within a stream work runs in the order in which it was issued. Between streams only events give an order:
``record`` marks a point of a stream, ``wait`` makes another stream wait for it. ``wait(COMPUTE, record(UP))`` lets no
kernel issued afterwards start before the copies up issued so far are done. The calling thread never waits, except
where it says so (``host_wait``): the worker, for what it is about to read, and where values leave for the user.

Without streams (a CPU machine) a copy is made when it is issued, and events are empty. Test doubles check the order of
events on any machine (``tests/helpers/doubles.py``).

Refused: a change of the stream on which a stowed model runs, since COMPUTE is one stream.

[Note: spare events] An accelerator's event is used again once nobody holds the ``Event`` that it was made for. A stream
that was told to wait for it waits for what it was then, as CUDA, HIP and SYCL say, whatever it becomes later; and only
who holds it can ask for it or wait for it later.

[Note: redundant waits] An event of a stream says that everything before it in that stream is done. Who has waited for
event 7 of UP need not wait for event 5 of UP. Each stream remembers the last event of each other that it waited for,
which makes repeated waits free and lets callers wait for every event that could matter.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

Regions = Sequence[Tensor | None]
POLL_S = 1e-4  # an update on the host takes hundreds of times as long


class Stream(Enum):
    """A queue whose work runs in order."""

    COMPUTE = "compute"
    UP = "up"
    DOWN = "down"
    NET = "net"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Event:
    """A point of a stream, after everything issued there before. ``number`` grows along the stream."""

    stream: Stream
    number: int
    handle: Any = None  # torch.Event where there are streams
    spare: list[Any] | None = field(default=None, repr=False, compare=False)  # where that goes, at the end of this

    def __del__(self) -> None:  # see [Note: spare events]
        if self.spare is not None and self.handle is not None:
            self.spare.append(self.handle)


class Transfer:
    """Copies made at once, for machines whose device is their memory; also the interface of the other classes.
    ``eager``: weights are evicted as soon as their scope is left, not when their address is needed, for test doubles.
    """

    eager = False

    def __init__(self) -> None:
        self._count: dict[Stream, int] = defaultdict(int)
        self._seen: dict[tuple[Stream, Stream], int] = defaultdict(int)
        self._spare: list[Any] | None = None
        self.bytes_up = self.bytes_down = 0

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Issue a copy of equal-sized flat tensors on ``stream``."""
        if stream is Stream.UP:
            self.bytes_up += target.nbytes
        else:
            self.bytes_down += target.nbytes
        self._copy(stream, target, source)

    def run(self, stream: Stream, work: Callable[[], object], *, reads: Regions, writes: Regions) -> None:
        """Issue kernels of the device on ``stream``."""
        self.uses(stream, reads=reads, writes=writes)
        self._run(stream, work)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        yield

    def record(self, stream: Stream) -> Event:
        """A point after everything issued on ``stream`` so far."""
        self._count[stream] += 1
        return Event(stream, self._count[stream], self._record(stream), self._spare)

    def wait(self, stream: Stream, *events: Event | None) -> None:
        """Nothing that is issued on ``stream`` from now on starts before ``events``. See [Note: redundant waits]."""
        for event in events:
            if event is None or event.stream is stream or self._seen[stream, event.stream] >= event.number:
                continue
            self._seen[stream, event.stream] = event.number
            self._wait(stream, event)

    def to_host(self, value: Tensor) -> tuple[Tensor, Event]:
        """A copy of a few numbers on the host, to be read once the event has passed."""
        copy = torch.empty_like(value, device="cpu", pin_memory=value.device.type != "cpu")
        copy.copy_(value, non_blocking=True)
        return copy, self.record(Stream.COMPUTE)

    def poison(self, stream: Stream, region: Tensor) -> None:
        """Fill ``region`` with NaN, or 0, on ``stream``, so that reading it before the copy that follows shows."""
        with self.on(stream):
            region.fill_(math.nan if region.is_floating_point() else 0)

    def done(self, event: Event | None) -> bool:
        """Whether ``event`` has passed, without waiting."""
        return event is None or event.handle is None or bool(event.handle.query())

    def host_wait(self, *events: Event | None) -> None:
        for event in events:
            if event is not None:
                self._host_wait(event)

    # The next two do nothing here. They tell test doubles who uses which memory.
    def uses(self, stream: Stream, *, reads: Regions = (), writes: Regions = ()) -> None: ...

    def vacated(self, home: Tensor, *after: Event | None) -> None:
        """Say that ``home`` is not used any more once these events have passed."""

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        with self.on(stream):
            target.copy_(source, non_blocking=True)

    def _run(self, stream: Stream, work: Callable[[], object]) -> None:
        with self.on(stream):
            work()

    def _record(self, stream: Stream) -> Any:
        return None

    def _wait(self, stream: Stream, event: Event) -> None: ...

    def _host_wait(self, event: Event) -> None: ...


class AcceleratorTransfer(Transfer):
    """One stream up, one down, as a GPU has one copy engine per direction; compute is the stream on which the caller
    runs. Saved tensors have a transfer of their own: they would queue behind weights that wait for their addresses.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._streams = {stream: torch.Stream(device=device) for stream in (Stream.UP, Stream.DOWN, Stream.NET)}
        self._device = device
        self._spare = self._events = list[torch.Event]()  # made, and held by nobody
        self._compute: torch.Stream | None = None

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        # ``with stream:`` would share the former stream between threads.
        former, current = torch.accelerator.current_stream(self._device), torch.accelerator.current_device_index()
        torch.accelerator.set_stream(self._stream(stream))  # its device becomes the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(former)
            if current != former.device_index:
                torch.accelerator.set_device_index(current)

    def _stream(self, stream: Stream) -> torch.Stream:
        """COMPUTE: the caller's; backward runs in a thread of its own, on the stream of the forward it belongs to."""
        if stream in self._streams:
            return self._streams[stream]
        current = torch.accelerator.current_stream(self._device)
        if self._compute is None:
            self._compute = current
        elif self._compute != current:  # redundant waits are left out by stream, which is right for one stream only
            raise RuntimeError("a stowed model runs on the stream on which it first ran: do not change the stream")
        return current

    def _record(self, stream: Stream) -> torch.Event | None:
        if stream is Stream.HOST:
            return None  # the worker's result is awaited before its event is used
        try:
            event = self._events.pop()
        except IndexError:
            event = torch.Event(device=self._device)
        event.record(self._stream(stream))
        return event

    def _wait(self, stream: Stream, event: Event) -> None:
        if event.handle is not None and stream is not Stream.HOST:
            self._stream(stream).wait_event(event.handle)

    def _host_wait(self, event: Event) -> None:
        """Poll and sleep: ``synchronize`` keeps a core busy, and the worker's kernels need it."""
        if event.handle is not None:
            while not event.handle.query():
                time.sleep(POLL_S)
            event.handle.synchronize()  # raises errors of the device


def transfer_for(device: torch.device) -> Transfer:
    """The transfer that suits ``device``."""
    return Transfer() if device.type == "cpu" else AcceleratorTransfer(device)
