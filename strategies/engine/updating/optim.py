"""Update rules: what an optimizer does to a parameter, its gradient and its state, by torch's own kernels.

A rule gets lists of views of the same shape as plain training's tensors, or parts of them, and updates them in place,
on whatever device they are. Element-wise kernels give each element the same bits wherever it lies; for split points see
[Note: split points] in ``updates.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd


@dataclass(frozen=True, slots=True)
class Operands:
    """Views that one call updates, in equal order. ``state`` has one list for each of the rule's ``names``."""

    params: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    steps: list[Tensor]


class UpdateRule(Protocol):
    """An update rule. ``names`` are torch's for its state, one fp32 number per element each. ``flagged``: its kernel
    takes a flag that skips the update. For other rules the caller waits for the flag's value.
    """

    names: ClassVar[tuple[str, ...]]

    @property
    def flagged(self) -> bool: ...

    def defaults(self) -> dict[str, Any]: ...

    def update(self, on: Operands, group: Mapping[str, Any], bad: Tensor | None) -> None:
        """Update in place. ``bad`` (only if ``flagged``): 1.0 skips the update."""


# Torch's other keys of a group, so that its own optimizer can load the state dict.
TORCH = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """``torch.optim.AdamW`` (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019); ``fused``: torch's
    fused kernel, otherwise what torch takes by default.
    """

    names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    fused: bool = True

    @property
    def flagged(self) -> bool:
        return self.fused

    def defaults(self) -> dict[str, Any]:
        return {**asdict(self), "fused": self.fused or None, "decoupled_weight_decay": True, **TORCH}

    def update(self, on: Operands, group: Mapping[str, Any], bad: Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            on.params,
            on.grads,
            on.state[0],
            on.state[1],
            [],
            on.steps,
            fused=self.fused or None,  # None: torch chooses, as in torch.optim.AdamW
            found_inf=bad,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """``torch.optim.SGD`` without momentum: no state at all."""

    names: ClassVar[tuple[str, ...]] = ()

    lr: float = 1e-3
    weight_decay: float = 0.0

    @property
    def flagged(self) -> bool:
        return False

    def defaults(self) -> dict[str, Any]:
        return asdict(self)

    def update(self, on: Operands, group: Mapping[str, Any], bad: Tensor | None) -> None:
        sgd(
            on.params,
            on.grads,
            [None] * len(on.params),
            weight_decay=group["weight_decay"],
            momentum=0.0,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        torch._foreach_add_(on.steps, 1)
