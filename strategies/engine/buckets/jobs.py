"""Updates as they are handed on: of which parameters, with which hyperparameters, and by which factor on gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from strategies.engine.transfer.transfer import Event


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor on every gradient of a step, and whether the step is to be skipped.

    ``factor`` (None: there is nothing to multiply) and ``bad`` (1.0: a gradient is not finite) are single fp32 numbers
    on the device; ``on_host`` holds both for the worker, once ``known`` has passed.
    """

    factor: Tensor | None
    bad: Tensor
    on_host: Tensor
    known: Event

    @property
    def skips(self) -> bool:
        """Whether the step is to be skipped. Only valid after ``known`` has passed; reads host memory."""
        return bool(self.on_host.numpy()[1])


@dataclass(frozen=True, slots=True)
class Job:
    """One update of one bucket: which parameters have a gradient, and with which hyperparameters.

    ``group`` is a copy: a scheduler may change the rate before the update is computed.
    """

    touched: tuple[int, ...]
    group: Mapping[str, Any]
    scale: Scale
