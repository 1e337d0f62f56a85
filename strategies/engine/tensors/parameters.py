"""What the parameters and gradients of a stowed model are to everybody else.

Problem. Any code may read a parameter at any time: a loss that multiplies by ``lm_head.weight`` itself, a callback that
averages weights, ``torch.nn.utils.clip_grad_norm_``. The engine moves weights when modules are called, and gradients
as soon as they land; whoever reads otherwise would find other bytes, or nothing.

So the engine changes the *class* of a parameter and nothing else; modules and optimizers hold the same object.

    PresentParameter   its memory holds its newest value now, and no copy on its way may change that. Its use is free
    VisitingParameter  the same of one that travels. Views of it may outlive its stay, so each is an ``Alias``: as long
                       as the weight is there it is an ordinary view, later it reads like an absent parameter
    AbsentParameter    away, or being updated. A torch function that reads it gets the newest value: one that stays is
                       settled and becomes present; of one that travels a copy is made, through which gradients flow

``param.grad`` has a class of its own, too (``parked_gradient.py``).

Invariant. What is read is right, or reading raises. Writing outside of ``optimizer.present`` or ``load_state_dict``
raises: at once where it can be seen, at the next step where only torch's version counter shows it.

[Note: hooks inside] Where somebody has hooks on what autograd saves inside of a block, they keep what they are given,
unseen by ``guard.py`` and by torch's own check. A weight that travels is read as a copy there. Tables of embeddings are
not: backward does not need them.

Refused: raw addresses of parameters that are away, copies and pickles of stowed models, gradients assigned by hand,
and hooks that run as each gradient is accumulated, since that is when it leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.engine.tensors.guard import others_keep
from strategies.engine.tensors.torch_functions import (
    ADDRESSES,
    ARRAYS,
    NEW,
    asks_about,
    asks_for_node,
    call,
    converts_nothing,
    for_aliases,
    looks_for_node,
    only_read,
    others_stand,
    written,
)

STOWED = "_stowed"  # in the dict of a model that an optimizer drives
RAW_DATA: Any = Tensor.data  # torch's own, beneath the properties below
RAW_GRAD: Any = Tensor.grad
RAW_REGISTER: Any = Tensor.register_hook
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
set_counts: Any = torch._C._autograd._unsafe_set_version_counter  # of writes, which torch compares in backward
WRITE = "write under `with optimizer.present([parameter]):`, use load_state_dict, or close() the optimizer first"
NODE = "so is its place in the graph: use param.register_hook"


class Keeper(Protocol):
    """Who answers for one parameter; see ``state_dict.py``."""

    name: str

    home: tuple[int, int]  # addresses at which it lies when it is there

    @property
    def window(self) -> int:
        """Counts the times that gradients were taken or given up."""

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

    def scale_gradient(self, factor: Tensor | float) -> None:
        """Multiply the gradient that waits when the update reads it."""

    def zero_gradient(self) -> None:
        """The gradient becomes zero, as by ``zero_grad(set_to_none=False)``."""

    @property
    def here(self) -> bool:
        """Whether it is shown in its home."""

    def follow(self, view: Tensor) -> Tensor:
        """``view``, which shares the parameter's home, as an ``Alias`` from now on."""

    def read_view(self, view: Tensor) -> Tensor:
        """``view`` itself while the weight is in its home, else a copy of what it shows."""


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
        if value is None:
            self._keeper.forget_gradient()
        elif getattr(value, "_keeper", None) is not self._keeper:  # ``param.grad *= 0.5`` assigns what it found
            raise RuntimeError(f"{self._keeper.name}: {ASSIGNED}")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refused: see the module docstring."""
        raise RuntimeError(f"{self._keeper.name}: {ACCUMULATED}")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(COPIED)


class PresentParameter(StowedParameter):
    """Its memory holds its newest value. Torch's functions see a plain parameter."""


class VisitingParameter(StowedParameter):
    """As present, in a home that it will leave."""

    _stands_for = "a weight that is here"

    @property
    def data(self) -> Tensor:
        """Its newest value, to read."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._keeper.follow(RAW_DATA.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        StowedParameter.data.fset(self, value)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1:
            if others_stand(types, VisitingParameter, Alias):
                return NotImplemented
            if Alias in types:
                return Alias.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            is_new = func in NEW
            if not is_new and asks_about(func):
                return func(*args, **kwargs)
            if others_keep() and func not in TABLES:  # [Note: hooks inside]
                args, kwargs = tree_map_only(
                    VisitingParameter, lambda w: Elsewhere.apply(w, RAW_DATA.__get__(w).clone()), (args, kwargs)
                )
                return func(*args, **kwargs)
            out = func(*args, **kwargs)
            if is_new:
                return out
            for param in (*args, *kwargs.values()):
                if type(param) is VisitingParameter:
                    keeper = param._keeper
                    out = for_aliases(out, *keeper.home, keeper.follow)
        return out


class Alias(Tensor):
    """A view of a weight that travels, made while it was there."""

    _stands_for = "a view of a weight"
    _keeper: Keeper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if others_stand(types, VisitingParameter, Alias):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if asks_for_node(func):  # which torch would make anew, of a weight that is not here
                for alias in tree_leaves((args, kwargs)):
                    if isinstance(alias, Alias) and not alias._keeper.here:
                        raise RuntimeError(f"a view of {alias._keeper.name} is away; {NODE}")
            if asks_about(func):
                return func(*args, **kwargs)
            for target in written(func, args, kwargs):
                if isinstance(target, Alias):
                    raise RuntimeError(f"{func.__name__} on a view of {target._keeper.name}, which travels; {WRITE}")
            found: list[Alias] = []
            copies: list[Tensor] = []

            def read(alias: Alias) -> Tensor:
                value = alias._keeper.read_view(alias)
                (found if value is alias else copies).append(value)  # type: ignore[arg-type]
                return value

            args, kwargs = tree_map_only(Alias, read, (args, kwargs))
            if VisitingParameter in types:
                out = VisitingParameter.__torch_function__(func, (VisitingParameter,), args, kwargs)
            else:
                out = func(*args, **kwargs)
            for alias in found:
                out = for_aliases(out, *alias._keeper.home, alias._keeper.follow)
                if func in ARRAYS:
                    out.setflags(write=False)
            return only_read(func, out, copies, ReadOnly)


class AbsentParameter(StowedParameter):
    """Away, being updated, or present for somebody else. Torch's functions come by here."""

    _stands_for = "a weight that is not here"

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
            if asks_about(func) or converts_nothing(func, args, kwargs):
                return func(*args, **kwargs)
            for target in written(func, args, kwargs):
                if isinstance(target, AbsentParameter):
                    raise RuntimeError(f"{target._keeper.name}: {func.__name__} on a parameter that is away; {WRITE}")
            if looks_for_node(func, args):
                raise RuntimeError(f"{args[0]._keeper.name} is away; {NODE}")
            if func in ADDRESSES:
                args[0]._keeper.require_present(func.__name__)
                return func(*args, **kwargs)
            copies: list[Tensor] = []

            def read(param: AbsentParameter) -> Tensor:
                value = param._keeper.read()
                if value is not param:
                    copies.append(value)
                return value

            args, kwargs = tree_map_only(AbsentParameter, read, (args, kwargs))
            out = call(func, args, kwargs, ask=others_stand(types, AbsentParameter))
            return only_read(func, out, copies, ReadOnly)


class ReadOnly(Tensor):
    """A value that is shown. Writing to it, or to a view of it, raises: it would reach nobody."""

    _stands_for = "a value that is shown"
    _refusal = f"on what a stowed parameter shows; {WRITE}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if asks_about(func):
                return func(*args, **kwargs)
            for target in written(func, args, kwargs):
                if isinstance(target, ReadOnly):
                    raise RuntimeError(f"{func.__name__} {target._refusal}")
            shown = [value for value in (*args, *kwargs.values()) if isinstance(value, ReadOnly)]
            ask = others_stand(types, ReadOnly)
            if ask:
                args, kwargs = tree_map_only(ReadOnly, lambda value: value.as_subclass(Tensor), (args, kwargs))
            return only_read(func, call(func, args, kwargs, ask=ask), shown, type(shown[0]) if shown else ReadOnly)


TABLES = frozenset([nn.functional.embedding, torch.embedding])
ASSIGNED = (
    "gradients of a stowed model come from backward only (torch.distributed.checkpoint assigns some to an optimizer "
    "that has not made a step: make one before, or use optimizer.save() and load())"
)
ACCUMULATED = (
    "gradients leave as they are accumulated, so that a hook at that moment has nothing to look at: use "
    "param.register_hook, or param.grad after backward"
)


# --- changing the class ----------------------------------------------------------------------------------------------


def set_data(param: Tensor, value: Tensor) -> None:
    """``param.data = value``, whatever the class."""
    RAW_DATA.__set__(param, value)


def put(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value``, also from one kind of device to another.

    Torch assigns data between the CPU and the kinds of device that it knows itself; for those that register with it
    (PrivateUse1) two tensors change places behind their Python objects, and ``tensor`` stays the object that it was.
    Torch keeps hooks with what is behind, so they are taken along. A graph that was made before is of the old one, and
    backward through it raises.
    """
    if torch._has_compatible_shallow_copy_type(tensor, value):
        set_data(tensor, value)
        return
    version, given, trained = tensor._version, tensor.__class__, tensor.requires_grad and tensor.is_leaf
    other = torch.Tensor._make_subclass(given, RAW_DATA.__get__(value), tensor.requires_grad)
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    hooks = {name: getattr(tensor, name) for name in HOOKS} if trained else {}
    for name in hooks:
        setattr(tensor, name, None)
    torch._C._swap_tensor_impl(tensor, other)
    for name, called in hooks.items():  # torch calls what is set anew; an old dictionary that is kept it does not
        setattr(tensor, name, called or None)
    if trained:
        RAW_REGISTER(other, _refuse_old_graph)
    tensor.__class__ = given
    set_counts((tensor,), (version,))


def _refuse_old_graph(grad: Tensor) -> None:
    raise RuntimeError(
        "backward through a graph that was made before its model was stowed or closed: on this kind of device the "
        "gradient would reach nobody"
    )


def on_gradient(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> torch.utils.hooks.RemovableHandle:
    """Call ``hook`` each time that autograd has left a gradient at ``param``."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.register_post_accumulate_grad_hook(param, hook)  # type: ignore[no-any-return, no-untyped-call]


def take_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient that autograd has left at ``param``, which has none afterwards."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: Tensor | None = RAW_GRAD.__get__(param)
        RAW_GRAD.__set__(param, None)
    return grad


class Elsewhere(torch.autograd.Function):
    """A parameter and a copy of its value: forward gives the copy, backward the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
