"""Norms of gradients, as numbers on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

# The norm of a step's gradients on a device, from that of each, by parameter and in the order of the model.
TotalNorm: TypeAlias = Callable[[Mapping[str, Tensor], torch.device], Tensor]


def together(numbers: list[Tensor], device: torch.device) -> list[Tensor]:
    """Single numbers from the host on ``device``, in one asynchronous copy."""
    stacked = torch.stack(numbers)
    if device.type != "cpu":
        stacked = stacked.pin_memory().to(device, non_blocking=True)
    return list(stacked.unbind())


def norms_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each, as fp32, by the function that ``torch.nn.utils.clip_grad_norm_`` calls."""
    if not grads:
        return []
    return list(torch._foreach_norm(list(grads), 2.0, torch.float32))


def norm_of_all(norms: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The ``TotalNorm`` of a whole model."""
    none = torch.zeros((), device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms.values())), 2.0) if norms else none
    return total
