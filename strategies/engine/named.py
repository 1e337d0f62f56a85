"""What the engine does, by name, in a profiler's trace: copies, waits, updates, exchanges.

A name begins with what works, as in the simulator: ``up: weight copy model.layers.3``, ``cpu: update model.layers.3``,
``wait: compute for up``. A copy is known by its address on the host. Methods are wrapped only while a profile is taken,
so a run that takes none pays nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.transfer.transfer import Stream

if TYPE_CHECKING:
    from deepstow.strategies.engine.optimizer import StowOptimizer


def name_calls(until: ExitStack, it: Any, method: str, name_of: Callable[..., str]) -> None:
    """Give calls of a method of an object names that follow from their arguments, until the stack is closed."""
    former = getattr(it, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name_of(*args)):
            return former(*args, **kwargs)

    setattr(it, method, call)
    until.callback(delattr, it, method)


def name_engine(until: ExitStack, optimizer: StowOptimizer) -> None:
    """Give names to the work of the engine."""
    engine, host = optimizer.engine, Places(optimizer.engine.arena)
    name_calls(until, engine.updates, "_on_device", lambda bucket: f"compute: update {bucket.name}")
    name_calls(until, engine.updates, "_on_host", lambda bucket, *_: f"cpu: update {bucket.name}")
    for transfer in optimizer.transfers:
        name_calls(until, transfer, "copy", host.name_copy)
        name_calls(until, transfer, "_wait", lambda stream, event: f"wait: {stream.value} for {event.stream.value}")
        name_calls(until, transfer, "_host_wait", lambda event: f"wait: host for {event.stream.value}")
    if engine.ranks.many:
        name_calls(until, engine.ranks, "gather", lambda bucket: f"net: weight {bucket.name}")
        name_calls(until, engine.ranks, "average", lambda bucket, *_: f"net: gradient {bucket.name}")


class Places:
    """What lies where in the host's arena; slots that several buckets pass through have the name of their kind."""

    def __init__(self, arena: Arena) -> None:
        names = dict[tuple[int, int], str]()
        for (bucket, item), spot in arena.addresses.spots.items():
            memory = arena.of(bucket, item, torch.uint8) if spot.tier is Tier.HOST else None
            if memory is not None and memory.numel():
                place = memory.data_ptr(), memory.data_ptr() + memory.numel()
                names[place] = item.value if place in names else f"{item.value} {bucket}".rstrip()
        self._places = [(-1, -1, ""), *sorted((*place, name) for place, name in names.items())]

    def name_copy(self, stream: Stream, target: Tensor, source: Tensor) -> str:
        at = (source if stream is Stream.UP else target).data_ptr()
        _, end, name = self._places[bisect(self._places, at, key=lambda place: place[0]) - 1]
        return f"{stream.value}: {name if at < end else 'memory'}"
