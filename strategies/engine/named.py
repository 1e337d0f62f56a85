"""What the engine does, by name, in a profiler's trace: copies, waits, updates, exchanges.

A name begins with what works, as in the simulator: ``up: weight copy model.layers.3``, ``cpu: update model.layers.3``,
``wait: compute for up``. A copy is known by its address on the host. The methods are wrapped only while a profile is
taken, so a run that takes none pays nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from strategies.core.facts import Home
from strategies.engine.memory.arena import Arena
from strategies.engine.transfer.transfer import Event, Lane

if TYPE_CHECKING:
    from strategies.engine.optimizer import StowOptimizer


@contextmanager
def named(optimizer: StowOptimizer) -> Iterator[None]:
    """Inside, the work of the engine has names."""
    engine = optimizer.engine
    host = Places(engine.arena)
    wrapped: list[tuple[Any, str, Callable[..., str]]] = [
        (engine.updates, "_on_device", lambda bucket: f"compute: update {bucket.name}"),
        (engine.updates, "_on_host", lambda bucket, *_: f"cpu: update {bucket.name}"),
    ]
    for transfer in optimizer.transfers:
        wrapped += [
            (transfer, "copy", host.name_copy),
            (transfer, "_wait", _wait),
            (transfer, "_host_wait", _host_wait),
        ]
    if engine.ranks.many:
        wrapped += [
            (engine.ranks, "gather", lambda bucket: f"net: weight {bucket.name}"),
            (engine.ranks, "average", lambda bucket, *_: f"net: gradient {bucket.name}"),
        ]
    for it, method, name_of in wrapped:
        setattr(it, method, partial(_named, getattr(it, method), name_of))
    try:
        yield
    finally:
        for it, method, _ in wrapped:
            delattr(it, method)


def _named(method: Callable[..., Any], name_of: Callable[..., str], *args: Any) -> Any:
    with record_function(name_of(*args)):
        return method(*args)


def _wait(lane: Lane, event: Event) -> str:
    return f"wait: {lane.value} for {event.lane.value}"


def _host_wait(event: Event) -> str:
    return f"wait: host for {event.lane.value}"


class Places:
    """What lies where in the host's arena; slots that several buckets pass through have the name of their kind."""

    def __init__(self, arena: Arena) -> None:
        found = dict[tuple[int, int], str]()
        for (bucket, item), spot in arena.addresses.spots.items():
            memory = arena.of(bucket, item, torch.uint8) if spot.home is Home.HOST else None
            if memory is not None and memory.numel():
                place = memory.data_ptr(), memory.data_ptr() + memory.numel()
                found[place] = item.value if place in found else f"{item.value} {bucket}".rstrip()
        self._places = sorted(found.items())

    def name_copy(self, lane: Lane, target: Tensor, source: Tensor) -> str:
        at = (source if lane is Lane.UP else target).data_ptr()
        index = bisect(self._places, at, key=lambda place: place[0][0]) - 1
        (start, end), name = self._places[index] if self._places else ((0, 0), "")
        return f"{lane.value}: {name if start <= at < end else 'memory'}"
