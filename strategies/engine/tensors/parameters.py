"""The classes of a stowed model's parameters, by which any code can read them at any time.

The engine moves weights when modules are called, but any code may read a parameter: a loss that multiplies by
``lm_head.weight`` itself, a callback that averages weights. So the engine changes the *class* of a parameter and
nothing else; modules and optimizers keep the same object.

    PresentParameter   its memory has its newest value, and no pending copy will change that. Reading it costs nothing
    VisitingParameter  the same, for a weight that travels. Views of it may be used after it was evicted, so each is an
                       ``Alias``: an ordinary view while the weight is there, later it reads like an absent parameter
    AbsentParameter    evicted, or being updated. A torch function that reads it gets the newest value: a resident
                       weight finishes its update and becomes present; of one that travels a copy is made, through
                       which gradients flow

What is read is right, or reading raises. Writing outside of ``optimizer.present`` or ``load_state_dict`` raises: at
once if the write goes through a torch function, otherwise when the engine next looks at torch's count of writes, unless
the home is the weight's only memory (``parameter_views.py``, note: unseen writes).

[Note: other hooks] If other code has hooks on what autograd saves inside of a block, these keep the tensors that they
are given, unseen by ``guard.py`` and by torch's own check of versions. There a weight that travels is read as a copy.
Embedding tables are not copied: backward does not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from deepstow.strategies.engine.tensors.guard import others_keep
from deepstow.strategies.engine.tensors.torch_functions import (
    ARRAYS,
    NODES,
    call,
    has_other_stand_ins,
    is_no_conversion,
    needs_node,
    read_only,
    reads_no_value,
    replace_views,
    watched,
    with_values,
    written,
)

LATER = "_value_comes_later"  # in the dict of a placeholder
STOWED = "_stowed"  # in the dict of a model that an optimizer drives
RAW_DATA: Any = Tensor.data  # torch's own, beneath the properties below
RAW_GRAD: Any = Tensor.grad
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
set_counts: Any = torch._C._autograd._unsafe_set_version_counter  # of writes, which torch compares in backward
WRITE = "write under `with optimizer.present([parameter]):`, use load_state_dict, or close() the optimizer first"
RAW = "of what a stowed parameter or its gradient shows could be written to unseen: make a clone() to read it"
NODE = "so it has no node in the graph: use param.register_hook"


class Copied:
    """What is in the dict of a stowed model or behind its hooks: copying or pickling it raises a clear error."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(COPIED)


COPIED = (
    "this model is stowed: its weights lie in planned memory, so it cannot be copied or pickled. Save it with "
    "model.save_pretrained() or model.state_dict(); to copy it, close() its optimizer first"
)


class Address:
    """The storage of what stands for a weight or a gradient: where it is and how large, not to be written to."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_") and not name.endswith("__"):
            raise RuntimeError(f"{name} on the storage {RAW}")
        return getattr(self._storage, name)

    def copy_(self, source: Any, *args: Any) -> Address:
        """Of itself alone, which Triton's interpreter does after each kernel; it writes nothing."""
        if source.data_ptr() != self._storage.data_ptr():
            raise RuntimeError(f"copy_ on the storage {RAW}")
        return self


class NoRawMemory(Tensor):
    """Refuses what would write to its memory without torch's count of writes."""

    def untyped_storage(self) -> Any:
        storage = super().untyped_storage()
        return Address(storage) if torch._C._is_torch_function_enabled() else storage  # not when it is pickled

    def storage(self) -> Any:
        raise RuntimeError(f"storage() {RAW}")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"DLPack {RAW}")


class StowedParameter(Copied, NoRawMemory, nn.Parameter):
    """A parameter whose memory an engine manages; ``_keeper`` reads and changes it (``engine/keeper.py``)."""

    _keeper: Any

    @property
    def data(self) -> Tensor:
        """Its newest value, to read."""
        return self._newest()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # ``model.to(device)`` assigns the parameter itself if nothing changes
            raise RuntimeError(f"{self._keeper.name}: the memory of a stowed model is planned; {WRITE}")

    def _newest(self) -> Tensor:
        shown: Tensor = RAW_DATA.__get__(self).as_subclass(ReadOnly)
        return shown

    def set_(self, source: Tensor) -> Any:  # type: ignore[override]
        """Torch's own asks nobody. TypeError, since ``torch.nn.utils.parametrize`` replaces lines of other errors."""
        if source is not self:
            raise TypeError(f"{self._keeper.name}: set_() on a parameter, whose memory is planned; {WRITE}")
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient that waits for ``step``, or None."""
        waiting: Tensor | None = self._keeper.gradient()
        return waiting

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._keeper.forget_gradient()
        elif self._keeper.gradient() is None:
            raise RuntimeError(f"{self._keeper.name}: {ASSIGNED}")
        elif getattr(value, "_keeper", None) is self._keeper:  # ``param.grad *= 0.5`` assigns what it read
            value.refuse_gone()  # type: ignore[attr-defined]
        else:
            if hasattr(value, "_stand_in"):  # it would follow what becomes of the other one, as no copy does
                raise RuntimeError(f"{self._keeper.name}: {ANOTHERS}")
            if (value.shape, value.dtype) != (self.shape, self.dtype):
                given, mine = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (value, self))
                raise RuntimeError(f"{self._keeper.name}: a gradient of {given} assigned to a parameter that is {mine}")
            self._keeper.write_gradient(value.as_subclass(Tensor), multiplied=False)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        raise RuntimeError(f"{self._keeper.name}: {ACCUMULATED}")


class PresentParameter(StowedParameter):
    """Its memory has its newest value. Torch's functions treat it as a plain parameter."""

    def detach(self) -> Tensor:
        """It counts writes with the parameter; read-only where they would be refused."""
        detached: Tensor = super().detach()
        return detached if self._keeper.is_sole else detached.as_subclass(ReadOnly)


class VisitingParameter(StowedParameter):
    """As ``PresentParameter``, but it travels and will be evicted."""

    _stand_in = True

    def _newest(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            view: Tensor = self._keeper.follow(RAW_DATA.__get__(self))
            return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1:
            if has_other_stand_ins(types, VisitingParameter, Alias):
                return NotImplemented
            if Alias in types:
                return Alias.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if reads_no_value(func):
                return func(*args, **kwargs)
            if others_keep() and func not in TABLES and not written(func, args, kwargs):  # [Note: other hooks]
                return with_values(func, types, args, kwargs, VisitingParameter, _cloned, ReadOnly, _refuse_write)
            out = func(*args, **kwargs)
            for param in (*args, *kwargs.values()):
                if type(param) is VisitingParameter:
                    out = replace_views(out, param._keeper.home, param._keeper.follow)
        return out


class Alias(NoRawMemory):
    """A view of a weight that travels, made while it was present."""

    _stand_in = True
    _keeper: Any
    data: Any = property(Tensor.detach, RAW_DATA.__set__)  # an alias, too

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_other_stand_ins(types, VisitingParameter, Alias):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if needs_node(func):  # torch would make the node again, from a weight that is not present
                for alias in tree_leaves((args, kwargs)):
                    if isinstance(alias, Alias) and not alias._keeper.here:
                        raise RuntimeError(f"a view of {alias._keeper.name} is away; {NODE}")
            if reads_no_value(func):
                return func(*args, **kwargs)
            for target in written(func, args, kwargs):
                if isinstance(target, Alias):
                    raise RuntimeError(f"{func.__name__} on a view of {target._keeper.name}, which travels; {WRITE}")
            views: list[Alias] = []
            copies: list[Tensor] = []
            handed: list[tuple[Alias, Tensor]] = []

            def read(alias: Alias) -> Tensor:
                value: Tensor = alias._keeper.read_view(alias)
                (views if value is alias else copies).append(value)  # type: ignore[arg-type]
                handed.append((alias, value))
                return value

            args, kwargs = tree_map_only(Alias, read, (args, kwargs))
            with watched(handed, _refuse_write):
                if VisitingParameter in types:
                    out = VisitingParameter.__torch_function__(func, (VisitingParameter,), args, kwargs)
                else:
                    out = func(*args, **kwargs)
            for alias in views:
                out = replace_views(out, alias._keeper.home, alias._keeper.follow)
                if func in ARRAYS:
                    out.setflags(write=False)
            return read_only(func, out, copies, ReadOnly)


class AbsentParameter(StowedParameter):
    """Evicted, or being updated. Each torch function that takes it is intercepted here."""

    _stand_in = True

    def _newest(self) -> Tensor:
        value: Tensor = self._keeper.shown().as_subclass(ReadOnly)
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if reads_no_value(func) or is_no_conversion(func, args, kwargs):
                return func(*args, **kwargs)
            for target in written(func, args, kwargs):
                if isinstance(target, AbsentParameter):
                    raise RuntimeError(f"{target._keeper.name}: {func.__name__} on a parameter that is away; {WRITE}")
            if func in NODES and args[0] is args[1]:
                raise RuntimeError(f"{args[0]._keeper.name} is away; {NODE}")
            if func is Tensor.detach and args[0]._keeper.read() is args[0]:
                return args[0].detach()  # as one that is present
            if func is Tensor.data_ptr:
                args[0]._keeper.require_present(func.__name__)
                return func(*args, **kwargs)
            return with_values(func, types, args, kwargs, AbsentParameter, _read, ReadOnly, _refuse_write)


class ReadOnly(NoRawMemory):
    """A copy of a value, or a view of it that may be read only. Writing to it raises: the weight would not change."""

    _stand_in = True
    _refusal = f"on what a stowed parameter shows; {WRITE}"
    data: Any = property(Tensor.detach, RAW_DATA.__set__)  # read-only, too

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if reads_no_value(func):
                return func(*args, **kwargs)
            for target in written(func, args, kwargs):
                if isinstance(target, ReadOnly):
                    raise RuntimeError(f"{func.__name__} {target._refusal}")
            shown = [value for value in tree_leaves((args, kwargs)) if isinstance(value, ReadOnly)]
            ask = has_other_stand_ins(types, ReadOnly)
            if ask:
                args, kwargs = tree_map_only(ReadOnly, lambda value: value.as_subclass(Tensor), (args, kwargs))
            with watched([(value, value) for value in shown], cls._refuse_write):
                out = call(func, args, kwargs, ask=ask)
            return read_only(func, out, shown, type(shown[0]) if shown else ReadOnly)

    @classmethod
    def _refuse_write(cls, *_: Tensor) -> None:
        raise RuntimeError(f"a function that writes {cls._refusal}")


def _read(param: Any) -> Tensor:
    value: Tensor = param._keeper.read()
    return value


def _cloned(param: Tensor) -> Tensor:
    value: Tensor = Elsewhere.apply(param, RAW_DATA.__get__(param).clone())
    return value


def _refuse_write(stowed: Any, copy: Tensor) -> None:
    raise RuntimeError(f"{stowed._keeper.name}: a function wrote to a copy of a parameter that travels; {WRITE}")


TABLES = frozenset([nn.functional.embedding, torch.embedding])
ASSIGNED = (
    "gradients of a stowed model come from backward only (torch.distributed.checkpoint assigns some to an optimizer "
    "that has not made a step: make one before, or use optimizer.save() and load())"
)
ANOTHERS = "assigned to param.grad is what stands for a value elsewhere: assign a clone() of it"
ACCUMULATED = (
    "gradients are moved as they are accumulated, so a hook at that moment would find none: use "
    "param.register_hook, or param.grad after backward"
)


# --- changing the class ----------------------------------------------------------------------------------------------


def put(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value``, also from one kind of device to another.

    For kinds that register with torch (PrivateUse1) the implementations behind two Python objects are swapped, and
    ``tensor`` stays the same object. Torch keeps hooks with the implementation, so they are moved along. A graph that
    was made before belongs to the old implementation, and backward through it raises.
    """
    if torch._has_compatible_shallow_copy_type(tensor, value):
        RAW_DATA.__set__(tensor, value)
        return
    version = tensor._version
    kind = tensor.__class__
    trained = tensor.requires_grad and tensor.is_leaf
    donor = torch.Tensor._make_subclass(kind, RAW_DATA.__get__(value), tensor.requires_grad)
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    hooks = {name: getattr(tensor, name) for name in HOOKS} if trained else {}
    for name in hooks:
        setattr(tensor, name, None)
    torch._C._swap_tensor_impl(tensor, donor)
    for name, called in hooks.items():  # torch calls hooks that are set again, but not those in a dict that stayed
        setattr(tensor, name, called or None)
    if trained:
        Tensor.register_hook(donor, _refuse_old_graph)
    tensor.__class__ = kind
    set_counts((tensor,), (version,))


def placeholder(param: Tensor) -> nn.Parameter:
    """One NaN in the shape of ``param``, for a model that is given its values after it was stowed."""
    blank = nn.Parameter(torch.full((), math.nan, dtype=param.dtype).expand(param.shape), param.requires_grad)
    vars(blank)[LATER] = True
    return blank


def is_placeholder(tensor: Tensor) -> bool:
    """Whether its value comes later."""
    return LATER in vars(tensor)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers of ``model`` to ``device``; each remains the same object."""
    for buffer in model.buffers():
        put(buffer, buffer.detach().to(device))


def _refuse_old_graph(grad: Tensor) -> None:
    raise RuntimeError(
        "backward through a graph that was made before its model was stowed or closed: on this kind of device the "
        "gradient would be lost"
    )


def on_gradient(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> torch.utils.hooks.RemovableHandle:
    """Call ``hook`` each time that autograd has accumulated a gradient in ``param``."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.register_post_accumulate_grad_hook(param, hook)  # type: ignore[no-any-return, no-untyped-call]


def take_grad(param: nn.Parameter) -> Tensor | None:
    """Take the gradient that autograd has accumulated in ``param`` away from it."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: Tensor | None = RAW_GRAD.__get__(param)
        RAW_GRAD.__set__(param, None)
    return grad


class Elsewhere(torch.autograd.Function):
    """Forward returns a copy of a parameter's value, backward passes the copy's gradient to the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
