"""Updates as they are handed on: of which parameters, with which hyperparameters, and by which factor on gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from strategies.engine.transfer.transfer import Event


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
    """One update of one bucket: of the parameters that have a gradient, with a copy of their group."""

    touched: tuple[int, ...]
    group: Mapping[str, Any]
    scale: Scale
