"""A clock for the engine: copies and compute take the seconds that a machine would take, and none of ours.

Streams have a time each. An event is the time of its stream, a wait moves the waiting stream on, a copy takes its
latency and its bytes, both ways at full speed. Compute takes the seconds of the simulator's steps, at the borders of
scopes. The host is where compute is: it issues nothing for a step that compute has not reached. Copies are made at
once, so results are those of any other transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepstow.strategies.core.facts import Rates
from deepstow.strategies.engine.engine import Engine
from deepstow.strategies.engine.module_hooks import Scope
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer


class Clocked(Transfer):
    """See the module docstring."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        assert rates.duplex_factor == 1, "directions do not disturb each other here"
        self._rates = rates
        self.now = dict.fromkeys(Stream, 0.0)

    def work(self, seconds: float) -> None:
        """Compute takes so long."""
        self.now[Stream.COMPUTE] += seconds

    def done(self, event: Event | None) -> bool:
        return event is None or event.handle <= self.now[Stream.COMPUTE]

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        start = max(self.now[stream], self.now[Stream.COMPUTE])
        rate = self._rates.up_bytes_per_s if stream is Stream.UP else self._rates.down_bytes_per_s
        self.now[stream] = start + self._rates.link_latency_s + target.nbytes / rate

    def _record(self, stream: Stream) -> float:
        return self.now[stream]

    def _wait(self, stream: Stream, event: Event) -> None:
        self.now[stream] = max(self.now[stream], event.handle)

    def _host_wait(self, event: Event) -> None:
        self._wait(Stream.HOST, event)


def drive(engine: Engine, clock: Clocked, forward: Mapping[str, float], backward: Mapping[str, float]) -> None:
    """Let compute take these seconds per unit, each when the first scope of the unit is entered in that direction."""
    borders: Any = engine.hooks
    units = {name: unit for bucket in engine.buckets for name in bucket.spec.params for unit in bucket.spec.units}
    of_scope = {scope.name: _unit(scope, units) for scope in borders._scopes}

    def timed(enter: Any, seconds: Mapping[str, float]) -> Any:
        last: list[str] = []

        def entered(scope: Scope) -> None:
            again = seconds is forward and borders.backward  # its seconds are those of backward
            enter(scope)
            unit = of_scope[scope.name]
            if last != [unit] and not again:
                clock.work(seconds[unit])
            last[:] = [unit]

        return entered

    borders._enter_forward = timed(borders._enter_forward, forward)
    borders._enter_backward = timed(borders._enter_backward, backward)


def _unit(scope: Scope, units: Mapping[str, str]) -> str:
    name = next(name for name in units if name.startswith(f"{scope.name}."))
    return units[name]
