"""What the parameters and gradients of a stowed model are to everybody else.

Problem. Any code may read a parameter at any time: a loss that multiplies by ``lm_head.weight`` itself, a callback that
averages weights, ``torch.nn.utils.clip_grad_norm_``. The engine moves weights when modules are called, and gradients
as soon as they land; whoever reads otherwise would find other bytes, or nothing.

So the engine changes the *class* of a parameter and nothing else; modules and optimizers hold the same object.

    PresentParameter   its memory holds its newest value now, and no copy on its way may change that. Its use is free
    AbsentParameter    away, or being updated. A torch function that reads it gets the newest value: one that stays is
                       settled and becomes present; of one that travels a copy is made, through which gradients flow
    ParkedGradient     ``param.grad`` of a trained parameter between backward and step. Its norm is the true norm, to
                       multiply it by a factor is to clip, any other reader gets a copy

Invariant. What is read is right, or reading raises. Writing outside of ``optimizer.present`` or ``load_state_dict``
raises: at once where it can be seen, at the next step where only torch's version counter shows it.

Refused: raw addresses of parameters that are away, copies and pickles of stowed models, and gradients assigned by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Mapping

STOWED = "_stowed"  # in the dict of a model that an optimizer drives
RAW_DATA: Any = Tensor.data  # torch's own, beneath the properties below
RAW_GRAD: Any = Tensor.grad
WRITE = "write under `with optimizer.present([parameter]):`, or use load_state_dict"


class Keeper(Protocol):
    """Who answers for one parameter; see ``surface.py``."""

    name: str

    def read(self) -> Tensor:
        """The parameter itself, present now, or a copy of its newest value through which gradients flow."""

    def value(self) -> Tensor:
        """A copy of its newest value on the device."""

    def require_present(self, what: str) -> None:
        """Make it present for good. Raises: it travels."""

    def gradient(self) -> Tensor | None:
        """What stands for the gradient that waits for a step, if one does."""

    def forget_gradient(self) -> None:
        """The gradient that waits is not wanted."""

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradient that waits."""

    def gradient_value(self) -> Tensor:
        """A copy of the gradient that waits, on the device."""

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient that waits when the update reads it."""


class Copied:
    """In the dict of a stowed model and behind its hooks: who copies or pickles one of them gets a clear answer."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(COPIED)


COPIED = (
    "this model is stowed: its weights are where a plan says, so that it cannot be copied or pickled. Save it with "
    "model.save_pretrained() or model.state_dict(); to copy it, close() its optimizer first"
)


class StowedParameter(nn.Parameter):
    """A parameter whose memory an engine keeps."""

    _keeper: Keeper

    @property
    def data(self) -> Tensor:
        """Its newest value, to read."""
        shown: Tensor = RAW_DATA.__get__(self).as_subclass(ReadOnly)
        return shown

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # ``model.to(device)`` assigns what it found in place
            raise RuntimeError(f"{self._keeper.name}: the memory of a stowed model is planned; {WRITE}")

    @property
    def grad(self) -> Tensor | None:
        """The gradient that waits for ``step``, or None."""
        return self._keeper.gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(f"{self._keeper.name}: gradients of a stowed model come from backward only")
        self._keeper.forget_gradient()

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(COPIED)


class PresentParameter(StowedParameter):
    """Its memory holds its newest value. Torch's functions see a plain parameter."""


class AbsentParameter(StowedParameter):
    """Away, being updated, or present for somebody else. Torch's functions come by here."""

    @property
    def data(self) -> Tensor:
        """A copy of its newest value, to read."""
        return self._keeper.value().as_subclass(ReadOnly)

    @data.setter
    def data(self, value: Tensor) -> None:
        StowedParameter.data.fset(self, value)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _asks_about(func) or (func in CONVERSIONS and _converts_nothing(func, args, kwargs)):
                return func(*args, **kwargs)
            for written in _written(func, args, kwargs):
                if isinstance(written, AbsentParameter):
                    raise RuntimeError(f"{written._keeper.name}: {func.__name__} on a parameter that is away; {WRITE}")
            if func in ADDRESSES:
                args[0]._keeper.require_present(func.__name__)
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(AbsentParameter, lambda param: param._keeper.read(), (args, kwargs))
            out = func(*args, **kwargs)
        return out.as_subclass(ReadOnly) if func is Tensor.detach else out


class ReadOnly(Tensor):
    """A value that is shown. Writing to it, or to a view of it, raises: it would reach nobody."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(written, ReadOnly) for written in _written(func, args, kwargs)):
                raise RuntimeError(f"{func.__name__} on what a stowed parameter shows; {WRITE}")
            return tree_map(_still_read_only, func(*args, **kwargs))


class ParkedGradient(Tensor):
    """Stands for a gradient that waits for the step; its own elements are NaN."""

    _keeper: Keeper
    __hash__: ClassVar[Any] = Tensor.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _asks_about(func) or (func in CONVERSIONS and _converts_nothing(func, args, kwargs)):
                return func(*args, **kwargs)
            if func in NORMS and _is_euclidean(func, args, kwargs):
                norms = [grad._keeper.gradient_norm() for grad in _each(args[0])]
                return norms if isinstance(args[0], list | tuple) else norms[0]
            for written in _written(func, args, kwargs):
                if isinstance(written, ParkedGradient):
                    factor = _factor(func, args, kwargs)
                    if factor is None:
                        raise RuntimeError(
                            f"{func.__name__} on the gradient of {written._keeper.name}, which waits for the step: it "
                            f"can be read, and multiplied by one factor, as clip_grad_norm_ does"
                        )
                    written._keeper.scale_gradient(factor)
            if func in SCALINGS:
                return args[0]
            args, kwargs = tree_map_only(ParkedGradient, lambda g: g._keeper.gradient_value(), (args, kwargs))
            return func(*args, **kwargs)


# --- which function does what ----------------------------------------------------------------------------------------

ABOUT = frozenset(
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "is_pinned", "is_same_size",
        "get_device", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
        "untyped_storage", "_is_view", "__hash__", "__len__",
    )
) | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}  # fmt: skip
VALUES = frozenset(["T", "mT", "H", "mH", "real", "imag"])  # attributes that are views of the value
ADDRESSES = frozenset([Tensor.data_ptr])
CONVERSIONS = frozenset(
    [Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type]
)
NORMS = frozenset([torch.linalg.vector_norm, torch._foreach_norm, Tensor.norm, torch.norm])
SCALINGS = frozenset([Tensor.mul_, Tensor.__imul__, torch._foreach_mul_])


def _asks_about(func: Any) -> bool:
    """Whether the answer does not depend on the value: shapes, dtypes, hooks."""
    if type(func).__name__ == "method-wrapper":  # the getter or setter of an attribute
        return func.__self__.__name__ not in VALUES
    return func in ABOUT


def _converts_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversion would return the tensor itself, as ``model.to(device)`` mostly does."""
    probe = args[0].detach().as_strided((), ())  # to convert one element shows it
    return func(probe, *args[1:], **kwargs) is probe


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that ``func`` writes to."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    in_place |= name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    target = kwargs.get("out", (args[0] if args else kwargs.get("tensor")) if in_place else None)
    return _each(target)


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _still_read_only(out: Any) -> Any:
    return out.as_subclass(ReadOnly) if isinstance(out, Tensor) and out._is_view() else out


def _is_euclidean(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the norm over all elements of whole gradients is asked for, as clipping does."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    rest = [value for name, value in kwargs.items() if name not in ("ord", "p") and value not in (None, False)]
    return order in (2, 2.0, "fro") and len(args) <= 2 and not rest


def _factor(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The one number that gradients are multiplied with; None where it is something else."""
    factor = args[1] if func in SCALINGS and len(args) == 2 and not kwargs else None
    if isinstance(factor, float | int):
        return torch.tensor(float(factor))
    return factor if isinstance(factor, Tensor) and factor.dim() == 0 else None


# --- changing the class ----------------------------------------------------------------------------------------------


def set_data(param: nn.Parameter, value: Tensor) -> None:
    """``param.data = value``, whatever the class."""
    RAW_DATA.__set__(param, value)


def take_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient that autograd has left at ``param``, which has none afterwards."""
    grad: Tensor | None = RAW_GRAD.__get__(param)
    RAW_GRAD.__set__(param, None)
    return grad


def parked(keeper: Keeper, like: Tensor) -> ParkedGradient:
    """What stands for the gradient of ``keeper``'s parameter, as a tensor like ``like``."""
    gradient: ParkedGradient = like.as_subclass(ParkedGradient)
    gradient._keeper = keeper
    return gradient


class Elsewhere(torch.autograd.Function):
    """A parameter and a copy of its value: forward gives the copy, backward the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
