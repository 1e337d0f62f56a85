"""What a torch function does with its arguments: asks about them, writes to them, hands out their memory.

Tensors that stand for a parameter or a gradient (``parameters.py``, ``parked_gradient.py``) see every function that is
called with them and answer by kind. What is in no table here is taken for a reader of values, which gets the right
ones.

[Note: several kinds] One function may be called with tensors of several such classes. Torch asks one class, which knows
its own tensors only. It puts values in their place and calls the function again, so that the next class is asked. Those
that put nothing in their place, because the memory is right as it is, wait until they are alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

ABOUT = frozenset(
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "is_pinned", "is_same_size",
        "get_device", "register_hook", "retain_grad", "requires_grad_", "untyped_storage", "_is_view", "__hash__",
        "__len__",
    )
) | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}  # fmt: skip
GRAPH = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])  # ask for the place in a graph
HOOKS = frozenset([Tensor.register_hook, Tensor.retain_grad])
NODES = frozenset([Tensor.expand_as, Tensor.view_as])  # of a tensor as itself: how torch looks for its node
VALUES = frozenset(["T", "mT", "H", "mH", "real", "imag"])  # attributes that are views of the value
ADDRESSES = frozenset([Tensor.data_ptr])
CONVERSIONS = frozenset(
    [Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type]
)
# What blocks do with their weights, mostly. The result is new memory, so that nobody has to look for a view.
NEW = frozenset(
    [
        nn.functional.linear, nn.functional.layer_norm, nn.functional.rms_norm, nn.functional.embedding,
        torch.embedding, nn.functional.conv1d, nn.functional.conv2d, torch.addmm, torch.matmul, torch.bmm,
        torch.baddbmm, torch.mul,
        torch.add, Tensor.mul, Tensor.add, Tensor.matmul, Tensor.__mul__, Tensor.__rmul__, Tensor.__add__,
        Tensor.__radd__, Tensor.__matmul__, Tensor.__rmatmul__,
    ]
)  # fmt: skip
ARRAYS: Any = frozenset([Tensor.numpy, Tensor.__array__])  # type: ignore[list-item]


def asks_about(func: Any) -> bool:
    """Whether the answer does not depend on the value: shapes, dtypes, hooks, places in a graph."""
    if type(func).__name__ == "method-wrapper":  # the getter or setter of an attribute
        return func.__self__.__name__ not in VALUES
    return func in ABOUT or func in GRAPH


def asks_for_node(func: Any) -> bool:
    """Whether the answer is, or hangs on, the tensor's place in a graph."""
    if type(func).__name__ == "method-wrapper":
        return bool(func.__self__.__name__ == "grad_fn")
    return func in GRAPH or func in HOOKS


def converts_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` is a conversion that would return the tensor itself, as ``model.to(device)`` mostly does."""
    if func not in CONVERSIONS:
        return False
    probe = args[0].detach().as_strided((), ())  # to convert one element shows it
    return func(probe, *args[1:], **kwargs) is probe


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that ``func`` writes to."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    in_place |= name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    target = kwargs.get("out", (args[0] if args else kwargs.get("tensor")) if in_place else None)
    return each(target)


def each(value: Any) -> list[Any]:
    """A list of what ``value`` is or has."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def others_stand(types: Sequence[type], *own: type) -> bool:
    """Whether tensors of further classes that stand for something are in the call; see [Note: several kinds]."""
    return len(types) > 1 and any(hasattr(kind, "_stands_for") and not issubclass(kind, own) for kind in types)


def call(func: Any, args: Any, kwargs: Mapping[str, Any], *, ask: bool) -> Any:
    """``func``; ``ask``: other classes first, although the class that calls this is not asked again."""
    if not ask:
        return func(*args, **kwargs)
    with torch._C._EnableTorchFunction():
        return func(*args, **kwargs)


def looks_for_node(func: Any, args: Any) -> bool:
    """Whether somebody wants the node of a graph at which the gradient of a leaf arrives."""
    return func in NODES and args[0] is args[1]


def for_aliases(out: Any, begin: int, end: int, do: Callable[[Tensor], Tensor]) -> Any:
    """``out`` of a function; ``do`` with each of its tensors that begins between these addresses, in its place."""

    def look(one: Tensor) -> Tensor:
        return do(one) if one.layout is torch.strided and begin <= one.data_ptr() < end else one

    if isinstance(out, Tensor):  # mostly
        return look(out)
    return tree_map_only(Tensor, look, out) if isinstance(out, list | tuple | dict) else out


def only_read(func: Any, out: Any, copies: Sequence[Tensor], kind: type[Tensor]) -> Any:
    """``out`` of a function of copies: what shares their memory becomes a ``kind``, an array refuses writes."""
    if func in ARRAYS:
        out.setflags(write=False)
        return out
    for copy in copies:
        begin = copy.data_ptr()
        out = for_aliases(out, begin, begin + copy.nbytes, partial(_as_kind, kind))
    return out


def _as_kind(kind: type[Tensor], tensor: Tensor) -> Tensor:
    tensor.__class__ = kind  # and not as_subclass, which would put a node into the graph
    return tensor
