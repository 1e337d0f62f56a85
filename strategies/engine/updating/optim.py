"""Update rules: what an optimizer does to a parameter, its gradient and its state, by torch's own functions; Lion by
bitsandbytes'.

A rule gets lists of views of the same shape as plain training's tensors, or parts of them, and updates them in place,
on whatever device they are. It calls the function that the optimizer calls, with the same options. Element-wise
kernels give each element the same bits wherever it lies; for split points see [Note: split points] in ``updates.py``.

State is zero before the first update, as torch has it. Torch begins SGD's momentum with a copy of the gradient, which
adding it to zero is, too (but for the sign of a zero in it); hence no dampening, which torch leaves out of the first
update only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.adamw import adamw
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from deepstow.strategies.core.optimizers import STATE, state_names


@dataclass(frozen=True, slots=True)
class Operands:
    """Views that one call updates, in equal order. ``state`` has one list for each of the rule's ``names``. ``grads``
    get their values from ``at_rest``, in a lower precision, if that is not empty.
    """

    params: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    steps: list[Tensor]
    at_rest: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function that updates, and the options that it takes by name."""

    call: Callable[..., None]
    options: tuple[str, ...]
    fuses: bool = False  # it has a fused form
    counts: bool = True  # updates
    begins: bool = False  # its optimizer makes state before the first update


def lion(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    **torchs: Any,
) -> None:
    """As ``bitsandbytes.optim.Lion`` with ``optim_bits=32``. The number of updates does not matter to it."""
    from bitsandbytes.functional import optimizer_update_32bit

    for param, grad, moment in zip(params, grads, moments, strict=True):
        optimizer_update_32bit("lion", grad, param, moment, beta1, 0.0, 1, lr, None, beta2, weight_decay=weight_decay)
    torch._foreach_add_(steps, 1)


BETAS = ("lr", "betas", "eps", "weight_decay")
AMSGRAD = (*BETAS, "amsgrad")
KERNELS: Mapping[str, Kernel] = {
    "Adadelta": Kernel(adadelta, ("lr", "rho", "eps", "weight_decay")),
    "Adagrad": Kernel(adagrad, ("lr", "lr_decay", "eps", "weight_decay"), fuses=True, begins=True),
    "Adam": Kernel(adam, (*AMSGRAD, "decoupled_weight_decay"), fuses=True),
    "Adamax": Kernel(adamax, BETAS),
    "AdamW": Kernel(adamw, AMSGRAD, fuses=True),
    "Lion": Kernel(lion, ("lr", "betas", "weight_decay")),
    "RAdam": Kernel(radam, (*BETAS, "decoupled_weight_decay")),
    "RMSprop": Kernel(rmsprop, ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")),
    "SGD": Kernel(
        partial(sgd, dampening=0.0), ("lr", "weight_decay", "momentum", "nesterov"), fuses=True, counts=False
    ),
}


def class_of(kind: str) -> Any:
    """The optimizer of a rule. Raise ImportError: it is bitsandbytes', which is not there."""
    if kind == "Lion":
        import bitsandbytes

        return getattr(bitsandbytes.optim, kind)
    return getattr(torch.optim, kind)


class UpdateRule:
    """The update of the optimizer ``kind``, one of ``KERNELS``, with its ``options``; for others its own defaults.
    Raise ValueError: there is no such rule, or an option is one that it does not have.
    """

    def __init__(self, kind: str, **options: Any) -> None:
        if kind not in KERNELS:
            raise ValueError(f"no update rule {kind}: there are {', '.join(KERNELS)}")
        self.kind = kind
        self.kernel = KERNELS[kind]
        try:
            optimizer = class_of(kind)([nn.Parameter()], **options)
        except (TypeError, ImportError) as error:
            raise ValueError(f"{kind}: {error}") from None
        self._defaults: dict[str, Any] = optimizer.defaults

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The optimizer's names of its state, one fp32 number per element each."""
        return state_names(self.kind, self._defaults)

    @property
    def flagged(self) -> bool:
        """Whether its kernel takes a flag that skips the update. If not, the caller waits for the flag's value."""
        return bool(self._defaults.get("fused"))

    def defaults(self) -> dict[str, Any]:
        """Of a parameter group, by the optimizer's names, so that it can load the state dict."""
        return dict(self._defaults)

    def update_all(
        self, calls: Sequence[Operands], group: Mapping[str, Any], factor: Tensor | None, bad: Tensor | None = None
    ) -> None:
        """Update in place, one call after the other, with gradients times ``factor``. ``bad`` (only if ``flagged``):
        1.0 skips the update.
        """
        if self.kernel.call in (adam, adamw) and group["fused"] and bad is None:
            states = [dict(zip(self.names, on.state, strict=True)) for on in calls]
            first, second, largest = ([state.get(name, []) for state in states] for name in STATE[self.kind])
            params = [on.params for on in calls]
            grads = [on.grads for on in calls]
            at_rest = [on.at_rest for on in calls]
            adam_at_once(
                params, grads, at_rest, [on.steps for on in calls], first, second, largest, factor, group,
                decoupled=self.kernel.call is adamw or group["decoupled_weight_decay"],
            )  # fmt: skip
            return
        for on in calls:
            self._update(on, group, factor, bad)

    def _update(self, on: Operands, group: Mapping[str, Any], factor: Tensor | None, bad: Tensor | None) -> None:
        if on.at_rest:
            torch._foreach_copy_(on.grads, on.at_rest)
        if factor is not None:
            torch._foreach_mul_(on.grads, factor)
        options = {name: group[name] for name in self.kernel.options}
        if "betas" in options:
            options["beta1"], options["beta2"] = options.pop("betas")
        if self.kernel.fuses:
            options |= {"fused": group["fused"], "found_inf": bad, "grad_scale": None}
        state = dict(zip(self.names, on.state, strict=True))
        lists = [state.get(name, []) for name in STATE[self.kind]]
        steps = [on.steps] if self.kernel.counts else []
        self.kernel.call(on.params, on.grads, *lists, *steps, foreach=group.get("foreach"), maximize=False, **options)
        if not self.kernel.counts:
            torch._foreach_add_(on.steps, 1)


@contextmanager
def zeros_stay(weights: Sequence[Tensor]) -> Iterator[None]:
    """Elements of ``weights`` that are exactly zero before the block, an update, are zero after it. Takes a byte for
    each element meanwhile. Moments are those of the update.
    """
    zeros = [weight.detach() == 0 for weight in weights]
    yield
    for weight, zero in zip(weights, zeros, strict=True):
        weight.detach().masked_fill_(zero, 0.0)


AdamW = partial(UpdateRule, "AdamW", fused=True)
SGD = partial(UpdateRule, "SGD")


# --- Adam's calls of many chunks in one -------------------------------------------------------------------------------


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

    It runs without Python's lock. A thread that launches operators all the time takes the lock whenever another one
    leaves it, and a call of torch leaves it. The worker gets it back about a millisecond after each call, which takes
    less than that itself where many cores share an update. So the calls of a bucket run in the interpreter of
    TorchScript: the same operators on the same views in the same order, and the lock is taken back once.

    [Note: lists] TorchScript takes an operator that changes the elements of a list for one without effect if nobody
    else can have the list, and leaves it out. So all lists come from outside and none is made here. Bits are compared
    with torch's own calls (``tests/unit/test_at_once.py``).
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
