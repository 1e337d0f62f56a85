"""Jobs: what an update of a bucket is asked to do, and an update that was made before it was known to be asked for.

[Note: ahead] With clipping, an update has to wait for the norm of all gradients. If the norm turns out to be small it
multiplies nothing, so it can be made under backward, as soon as the bucket's gradients are there (``updates_ahead`` of
the layout). The worker then writes the new state beside the present one, which nobody changes. When the job comes, with
its scale, and asks for the same, the two change places; nothing is copied. Otherwise the job is carried out as ever,
from the present state and the gradient, which are as they were: there is nothing to undo. What reads, writes, or drops
in between finds the present state, and drops what was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepstow.strategies.engine.transfer.transfer import Event


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor on every gradient of a step, and whether the step is to be skipped."""

    factor: Tensor | None  # one fp32 number on the device; None: there is nothing to multiply
    bad: Tensor  # the same; 1.0: a gradient is not finite
    on_host: Tensor  # both for the worker, once ``known`` has passed
    known: Event

    @property
    def skips(self) -> bool:
        """Whether the step is to be skipped. Only valid after ``known`` has passed; reads host memory."""
        return bool(self.on_host.numpy()[1])

    @property
    def multiplies(self) -> bool:
        """Whether the factor changes gradients. Valid as ``skips`` is."""
        return bool(self.on_host.numpy()[0] != 1)


@dataclass(frozen=True, slots=True)
class Change:
    """An update of the parameters of a bucket that have a gradient, with a copy of their group."""

    touched: tuple[int, ...]
    group: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job(Change):
    """A change to gradients that are multiplied by the scale first."""

    scale: Scale


@dataclass(slots=True, eq=False)
class Ahead:
    """A change that the worker makes beside the present state. ``steps``: the counts after it, once it is made."""

    change: Change
    steps: Tensor | None = None
    future: Future[Event] | None = None

    def is_of(self, job: Job) -> bool:
        """Whether it was made, and is what ``job`` asks for, whose scale is known."""
        same = (self.change.touched, self.change.group) == (job.touched, job.group)
        return self.steps is not None and same and not job.scale.multiplies
