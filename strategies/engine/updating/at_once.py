"""Adam's calls of many chunks in one, which runs without Python's lock.

A thread that launches operators all the time takes the lock whenever another one leaves it, and a call of torch leaves
it. The worker gets it back about a millisecond after each call, which takes less than that itself where many cores
share an update. So the calls of a bucket run in the interpreter of TorchScript: the same operators on the same views in
the same order, and the lock is taken back once.

[Note: lists] TorchScript takes an operator that changes the elements of a list for one without effect if nobody else
can have the list, and leaves it out. So all lists come from outside and none is made here. Bits are compared with
torch's own calls (``tests/unit/test_at_once.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor


def adam_at_once(
    params: list[list[Tensor]],
    grads: list[list[Tensor]],
    at_rest: list[list[Tensor]],
    steps: list[list[Tensor]],
    first: list[list[Tensor]],
    second: list[list[Tensor]],
    largest: list[list[Tensor]],
    factor: Tensor | None,
    group: Mapping[str, Any],
    *,
    decoupled: bool,
) -> None:
    """What ``torch.optim.adam.adam`` does with ``fused`` in each of the calls that the lists have, after bringing and
    multiplying their gradients; ``at_rest`` and ``largest`` have empty lists where there are none.
    """
    beta1, beta2 = map(float, group["betas"])
    rate = float(group["lr"])
    eps = float(group["eps"])
    decay = float(group["weight_decay"])
    _scripted()(
        params, grads, at_rest, steps, first, second, largest, factor,
        rate, beta1, beta2, eps, decay, bool(group["amsgrad"]), decoupled,
    )  # fmt: skip


def _adam(
    params: list[list[Tensor]],
    grads: list[list[Tensor]],
    at_rest: list[list[Tensor]],
    steps: list[list[Tensor]],
    first: list[list[Tensor]],
    second: list[list[Tensor]],
    largest: list[list[Tensor]],
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    amsgrad: bool,
    decoupled: bool,
) -> None:  # in the part of Python that TorchScript knows; see [Note: lists]
    for i in range(len(params)):
        if len(at_rest[i]) > 0:
            torch._foreach_copy_(grads[i], at_rest[i])
        if factor is not None:
            torch._foreach_mul_(grads[i], factor)
        torch._foreach_add_(steps[i], 1)
        if decoupled:
            torch._fused_adamw_(
                params[i], grads[i], first[i], second[i], largest[i], steps[i],
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=amsgrad, maximize=False,
            )  # fmt: skip
        else:
            torch._fused_adam_(
                params[i], grads[i], first[i], second[i], largest[i], steps[i],
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=amsgrad, maximize=False,
            )  # fmt: skip


@cache
def _scripted() -> Callable[..., None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Callable[..., None] = torch.jit.script(_adam)
    return scripted
