"""The simulated accelerator with chosen lanes slowed down, so that a missing wait changes the numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from strategies.engine.transfer.transfer import AcceleratorTransfer, Lane
from strategies.engine.transfer.worker import Worker
from tests.helpers import simulated

DEVICE = "sim:0"
SLOW_US = {Lane.UP: 400, Lane.DOWN: 400, Lane.NET: 400, Lane.COMPUTE: 60, Lane.HOST: 4000}  # per piece of work
LANES: Mapping[str, tuple[Lane, ...]] = {"all": (), **{lane.value: (lane,) for lane in Lane}}


@cache
def library() -> Any:
    """The switches of the simulated device, loaded once. From then on the worker is slow while its lane is."""
    submit = Worker.submit

    def late(self: Worker, priority: int, work: Callable[[], Any]) -> Any:
        def later() -> Any:
            time.sleep(SLOW_US[Lane.HOST] / 1e6 if Lane.HOST in Slow.lanes else 0)
            return work()

        return submit(self, priority, later)

    Worker.submit = late  # type: ignore[method-assign, assignment]
    return simulated.load()


class Slow(AcceleratorTransfer):
    """Delays ``lanes`` by ``times`` what ``SLOW_US`` says; without lanes, every copy and kernel at random. ``times`` 0:
    nothing."""

    lanes: tuple[Lane, ...] = ()
    times = 1

    def __init__(self) -> None:
        super().__init__(torch.device(DEVICE))
        library().delay(*((300, 100) if not self.lanes and self.times else (0, 0)))
        library().slow(0, self._us(Lane.COMPUTE))
        for lane, stream in self._streams.items():
            library().slow(stream.stream_id, self._us(lane))

    def _us(self, lane: Lane) -> int:
        return self.times * SLOW_US[lane] if lane in self.lanes else 0


def slowly(lane: str, times: int, also: tuple[Lane, ...]) -> None:
    """Set what transfers made from now on delay; until one is made, nothing is slow on the device."""
    Slow.lanes, Slow.times = (*LANES[lane], *also), times
    library().delay(0, 0)
    library().slow(0, 0)
