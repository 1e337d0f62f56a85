"""``param.grad`` of a trained parameter between backward and step: a stand-in for the gradient that is elsewhere.

It gives the norm of the real gradient, and multiplying it by a factor (clipping) applies when the update reads the
gradient, so that ``torch.nn.utils.clip_grad_norm_`` works, and ``torch.amp.GradScaler``. Assigning ``None`` to
``param.grad`` discards it. Any other function gets a copy. If the function writes to that, it becomes the gradient;
what the function returns can be read only. After ``step`` reading it raises, until ``zero_grad``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepstow.strategies.engine.tensors.parameters import NoRawMemory, ReadOnly
from deepstow.strategies.engine.tensors.torch_functions import each, is_no_conversion, reads_no_value, with_values

NORMS = frozenset([torch.linalg.vector_norm, torch._foreach_norm, Tensor.norm, torch.norm])
DIVISIONS = frozenset([Tensor.div_, Tensor.divide_, Tensor.true_divide_, Tensor.__itruediv__, torch._foreach_div_])  # type: ignore[list-item]
SCALINGS = DIVISIONS | {Tensor.mul_, Tensor.multiply_, Tensor.__imul__, torch._foreach_mul_}
ITSELF = frozenset([Tensor.detach, Tensor.detach_, Tensor.requires_grad_])  # they change nothing: it has no graph


class ReadOnlyGradient(ReadOnly):
    """A copy of a gradient that waits. Writing to it raises: the gradient would not change."""

    _refusal = "on a copy of a part of a gradient that waits for the step: write to param.grad itself"


class PendingGradient(NoRawMemory):
    """Stands for a gradient that waits until the next step, with its shape; its own elements are NaN."""

    _stand_in = True
    _keeper: Any
    _window: int
    __hash__: ClassVar[Any] = Tensor.__hash__

    @property
    def data(self) -> Tensor:
        """The stand-in itself: scaling ``param.grad.data`` scales the gradient."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(f"{self._keeper.name}: gradients of a stowed model come from backward only")

    def set_(self, *source: Any) -> Any:
        """Torch's own asks nobody."""
        raise RuntimeError(f"{self._keeper.name}: set_() on a gradient that waits for the step: assign to param.grad")

    def refuse_gone(self) -> None:
        """Raise RuntimeError if its step was made, or all gradients were discarded."""
        if self._window != self._keeper.window:
            raise RuntimeError(f"{self._keeper.name}: this gradient belongs to an earlier step and is gone")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ITSELF:
                return args[0]
            if reads_no_value(func) or is_no_conversion(func, args, kwargs):
                return func(*args, **kwargs)
            for gradient in tree_leaves((args, kwargs)):
                if isinstance(gradient, PendingGradient):
                    gradient.refuse_gone()
            if func in NORMS and _is_euclidean(func, args, kwargs):
                norms = [
                    grad._keeper.gradient_norm()
                    if isinstance(grad, PendingGradient)
                    else torch.linalg.vector_norm(grad)
                    for grad in each(args[0])
                ]
                return norms if isinstance(args[0], list | tuple) else norms[0]
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                return _unscale(*args, **kwargs)
            if func is Tensor.zero_:
                args[0]._keeper.zero_gradient()
                return args[0]
            factor = _factor(func, args, kwargs)
            waiting = [] if factor is None else [grad for grad in each(args[0]) if isinstance(grad, PendingGradient)]
            for gradient in waiting:
                gradient._keeper.scale_gradient(factor)
            if waiting:
                others = [grad for grad in each(args[0]) if not isinstance(grad, PendingGradient)]
                if others:  # gradients of another model
                    func(others, *args[1:])
                return args[0]
            wrote = partial(_write, multiplied=func in SCALINGS)
            return with_values(func, types, args, kwargs, PendingGradient, _value, ReadOnlyGradient, wrote)


def _value(gradient: Any) -> Tensor:
    value: Tensor = gradient._keeper.gradient_value()
    return value


def _write(gradient: Any, value: Tensor, *, multiplied: bool) -> None:
    gradient._keeper.write_gradient(value, multiplied=multiplied)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """What a GradScaler does with all gradients of an optimizer. Those of a stowed model are multiplied together."""
    waiting = [grad for grad in grads if isinstance(grad, PendingGradient)]
    others = [grad for grad in grads if not isinstance(grad, PendingGradient)]
    if others:  # of another model
        torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inv_scale)
    for keeper in {id(grad._keeper.engine): grad._keeper for grad in waiting}.values():
        found_inf.copy_(torch.maximum(found_inf, keeper.unscale_gradients(inv_scale)))


def _is_euclidean(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the call computes the 2-norm over all elements of whole gradients, as clipping does."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    options = [value for name, value in kwargs.items() if name not in ("ord", "p") and value not in (None, False)]
    return order in (2, 2.0, "fro") and len(args) <= 2 and not options


def _factor(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | float | None:
    """The single number by which the call multiplies gradients; None if it does anything else."""
    factor = args[1] if func in SCALINGS and len(args) == 2 and not kwargs else None
    if func in DIVISIONS:
        return _inverse(factor)
    if isinstance(factor, float | int):
        return float(factor)
    single = isinstance(factor, Tensor) and factor.dim() == 0 and not hasattr(factor, "_stand_in")
    return factor if single else None


def _inverse(divisor: Any) -> float | None:
    """The factor that gives the same bits as dividing; None unless the divisor is a power of two."""
    single = isinstance(divisor, Tensor) and divisor.dim() == 0 and not hasattr(divisor, "_stand_in")
    if not isinstance(divisor, float | int) and not single:
        return None
    mantissa, exponent = math.frexp(float(divisor))
    return 1 / float(divisor) if abs(mantissa) == 0.5 and abs(exponent) < 100 else None
