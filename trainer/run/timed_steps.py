"""Seconds of the first steps: of forward and backward as blocks are timed (``block_timing.py``), and of whole steps.

The steps from ``FIRST`` to ``LAST`` are timed, and the median counts: while memory is touched for the first time and
kernels choose their ways, a step takes up to a third longer than later ones. A run that is shorter is timed until its
end. On an accelerator each border of a timed step waits for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from strategies.core.facts import UnitTimes
from strategies.engine.forward.blocks import find_blocks
from trainer.machine.block_timing import UnitClock, median_of, without_again

if TYPE_CHECKING:
    from torch import nn

    from strategies.core.plan import Plan

FIRST, LAST = 2, 8


class TimedSteps:
    """Clocks of steps ``FIRST`` to ``LAST``, as far as the run gets. A step is named by its number, from 1."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._clock: UnitClock | None = None
        self._began_s = 0.0
        self._seconds: dict[int, float] = {}
        self._units: list[UnitTimes] = []

    def begin(self, step: int) -> None:
        """``step`` begins."""
        if FIRST <= step <= LAST:
            self._clock, self._began_s = None, self._now()

    @contextmanager
    def forward(self, model: nn.Module, step: int) -> Iterator[None]:
        """Around each forward of ``step``; blocks are timed in its first micro-batch."""
        if not FIRST <= step <= LAST or self._clock is not None or not (blocks := find_blocks(model)):
            yield
            return
        self._clock = UnitClock(blocks, next(model.parameters()).device)
        with self._clock.forward():
            yield

    def end(self, step: int) -> None:
        """``step`` has ended."""
        if not FIRST <= step <= LAST or step in self._seconds:
            return
        self._seconds[step] = self._now() - self._began_s
        found = self._clock.seconds() if self._clock is not None else None
        if found is not None:
            self._units.append(found)

    @property
    def name(self) -> str:
        """What has been timed, for people: "steps 2 to 8"; empty if nothing was."""
        if not self._seconds:
            return ""
        first, last = min(self._seconds), max(self._seconds)
        return f"steps {first} to {last}" if last > first else f"step {first}"

    @property
    def step_seconds(self) -> float:
        """The median of the timed steps."""
        return statistics.median(self._seconds.values())

    def unit_times(self) -> UnitTimes | None:
        """The median of each unit's times, without recomputation; None if no step had all the marks that are needed."""
        if not self._units:
            return None
        found = without_again(median_of(self._units), self._plan.facts_as_kept())
        return replace(found, origin=f"measured in {self.name} of a run")

    def _now(self) -> float:
        if self._plan.facts.machine.has_accelerator:
            import torch

            torch.accelerator.synchronize()
        return time.perf_counter()
