"""What ``param.grad`` of a trained parameter is between backward and step.

Gradients leave the device as they land, so that ``param.grad`` can only stand for one. Its norm is the true norm, to
multiply it by a factor is to clip, ``None`` is to forget it; any other reader gets a copy, which is to read. After
``step`` it stands for a gradient that is gone, until ``zero_grad``.

Refused: other writes, to it or to a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.engine.tensors.parameters import Keeper, ReadOnly
from strategies.engine.tensors.torch_functions import (
    asks_about,
    call,
    converts_nothing,
    each,
    only_read,
    others_stand,
    written,
)

NORMS = frozenset([torch.linalg.vector_norm, torch._foreach_norm, Tensor.norm, torch.norm])
DIVISIONS = frozenset([Tensor.div_, Tensor.divide_, Tensor.true_divide_, Tensor.__itruediv__, torch._foreach_div_])  # type: ignore[list-item]
SCALINGS = DIVISIONS | {Tensor.mul_, Tensor.multiply_, Tensor.__imul__, torch._foreach_mul_}
ITSELF = frozenset([Tensor.detach, Tensor.detach_, Tensor.requires_grad_])  # a gradient is in no graph
Factor = Tensor | float


class ReadOnlyGradient(ReadOnly):
    """A copy of a gradient that waits. Writing to it would reach nobody."""

    _refusal = (
        "on a copy of a gradient that waits for the step: it can be read, and param.grad multiplied by one factor, as "
        "clip_grad_norm_ does"
    )


class ParkedGradient(Tensor):
    """Stands for a gradient that waits for the step; its own elements are NaN."""

    _stands_for = "a gradient that waits"
    _keeper: Keeper
    _window: int
    __hash__: ClassVar[Any] = Tensor.__hash__

    @property
    def data(self) -> Tensor:
        """Itself: to scale ``param.grad.data`` is to scale the gradient."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(f"{self._keeper.name}: gradients of a stowed model come from backward only")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ITSELF:
                return args[0]
            if asks_about(func) or converts_nothing(func, args, kwargs):
                return func(*args, **kwargs)
            for gradient in tree_leaves((args, kwargs)):
                if isinstance(gradient, ParkedGradient) and gradient._window != gradient._keeper.window:
                    raise RuntimeError(f"{gradient._keeper.name}: this gradient was of an earlier step, and is gone")
            if func in NORMS and _is_euclidean(func, args, kwargs):
                norms = [
                    grad._keeper.gradient_norm() if isinstance(grad, ParkedGradient) else torch.linalg.vector_norm(grad)
                    for grad in each(args[0])
                ]
                return norms if isinstance(args[0], list | tuple) else norms[0]
            if func is Tensor.zero_:
                args[0]._keeper.zero_gradient()
                return args[0]
            for target in written(func, args, kwargs):
                if isinstance(target, ParkedGradient):
                    factor = _factor(func, args, kwargs)
                    if factor is None:
                        if func.__name__.startswith("_amp_"):
                            raise RuntimeError("a stowed model takes no GradScaler: train in bf16 or fp32")
                        raise RuntimeError(
                            f"{func.__name__} on the gradient of {target._keeper.name}, which waits for the step: it "
                            f"can be read, and multiplied by one factor, as clip_grad_norm_ does"
                        )
                    target._keeper.scale_gradient(factor)
            if func in SCALINGS:
                others = [grad for grad in each(args[0]) if not isinstance(grad, ParkedGradient)]
                if others:  # gradients of another model
                    func(others, *args[1:])
                return args[0]
            copies: list[Tensor] = []

            def copy(gradient: ParkedGradient) -> Tensor:
                copies.append(gradient._keeper.gradient_value())
                return copies[-1]

            args, kwargs = tree_map_only(ParkedGradient, copy, (args, kwargs))
            out = call(func, args, kwargs, ask=others_stand(types, ParkedGradient))
            return only_read(func, out, copies, ReadOnlyGradient)


def parked(keeper: Keeper, like: Tensor, window: int) -> ParkedGradient:
    """What stands for the gradient of ``keeper``'s parameter until the next step, as a tensor like ``like``."""
    gradient: ParkedGradient = like.as_subclass(ParkedGradient)
    gradient._keeper, gradient._window = keeper, window
    return gradient


def _is_euclidean(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the norm over all elements of whole gradients is asked for, as clipping does."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    rest = [value for name, value in kwargs.items() if name not in ("ord", "p") and value not in (None, False)]
    return order in (2, 2.0, "fro") and len(args) <= 2 and not rest


def _factor(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Factor | None:
    """The one number that gradients are multiplied with; None where it is something else."""
    factor = args[1] if func in SCALINGS and len(args) == 2 and not kwargs else None
    if func in DIVISIONS:
        return _inverse(factor)
    if isinstance(factor, float | int):
        return float(factor)
    return factor if isinstance(factor, Tensor) and factor.dim() == 0 else None


def _inverse(divisor: Any) -> float | None:
    """What to multiply with instead, to the same bits: for powers of two, whose inverse is exact."""
    if not isinstance(divisor, float | int) and not (isinstance(divisor, Tensor) and divisor.dim() == 0):
        return None
    mantissa, exponent = math.frexp(float(divisor))
    return 1 / float(divisor) if abs(mantissa) == 0.5 and abs(exponent) < 100 else None
