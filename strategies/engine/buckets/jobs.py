"""What an update of a bucket is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True)
class Job:
    """An update of the parameters of a bucket that have a gradient, which is multiplied by the scale first."""

    touched: tuple[int, ...]
    group: Mapping[str, Any]  # a copy of their parameter group
    scale: Scale
