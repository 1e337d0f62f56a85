"""What a torch function does with its arguments: read their metadata, read or write their values, or return views.

Tensors that stand for a parameter or a gradient intercept every torch function that is called with them:
``weight.shape`` needs no value, ``weight + 1`` reads one, ``weight.add_(1)`` writes. A function that is in no table
here is treated as a reader and gets the right values.

[Note: several classes] A function may be called with tensors of several such classes. Torch calls the handler of one
class, which knows its own tensors only. It replaces them with values and calls the function again, so that the next
class is called. Classes that replace nothing, because the memory is right as it is, let the others go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

ABOUT = frozenset(
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "is_pinned", "is_same_size",
        "get_device", "register_hook", "retain_grad", "requires_grad_", "untyped_storage", "record_stream", "_is_view",
        "__hash__", "__len__",
    )
) | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}  # fmt: skip
GRAPH = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])  # need the node in the graph
HOOKS = frozenset([Tensor.register_hook, Tensor.retain_grad])
NODES = frozenset([Tensor.expand_as, Tensor.view_as])  # of a leaf as itself: so torch finds the node of its gradient
VALUES = frozenset(["T", "mT", "H", "mH", "real", "imag"])  # attributes that are views of the value
CONVERSIONS = frozenset(
    [Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type]
)
ARRAYS: Any = frozenset([Tensor.numpy, Tensor.__array__])  # type: ignore[list-item]


def reads_no_value(func: Any) -> bool:
    """Whether the result does not depend on the value: shapes, dtypes, hooks, nodes of a graph."""
    if type(func).__name__ == "method-wrapper":  # the getter or setter of an attribute
        return func.__self__.__name__ not in VALUES
    return func in ABOUT or func in GRAPH


def needs_node(func: Any) -> bool:
    """Whether the result is, or depends on, the tensor's node in a graph."""
    if type(func).__name__ == "method-wrapper":
        return bool(func.__self__.__name__ == "grad_fn")
    return func in GRAPH or func in HOOKS


def is_no_conversion(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` is a conversion that would return the tensor itself, as ``model.to(device)`` mostly does."""
    if func not in CONVERSIONS:
        return False
    probe = args[0].detach().as_strided((), ())  # converting one element tells
    return func(probe, *args[1:], **kwargs) is probe


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that ``func`` writes to, as far as that is known before it runs; see ``watched``."""
    places = [(0, "input")] if kwargs.get("inplace") is True else _written_places(func)
    targets = (args[at] if at is not None and at < len(args) else kwargs.get(name) for at, name in places)
    return [tensor for target in (*targets, kwargs.get("out")) for tensor in each(target)]


@cache
def _written_places(func: Any) -> Sequence[tuple[int | None, str]]:
    """The arguments that an operator's schema marks as written: positions, None if they go by name only, and names.

    Python's own protocol, ``nn.init`` and a few old methods have no schema: of these the name says it.
    """
    name = getattr(func, "__name__", "")
    if isinstance(func, torch._ops.OpOverload):
        schemas = [func._schema]
    elif isinstance(func, torch._ops.OpOverloadPacket):
        schemas = [getattr(func, overload)._schema for overload in func.overloads()]
    else:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    places = {
        (None if argument.kwarg_only else at, argument.name)
        for schema in schemas
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and "Tensor" in str(argument.type)
    }
    protocol = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    if name == "__setitem__" or (name.endswith("_") and (protocol or not name.endswith("__"))):
        places.add((0, "tensor"))
    return tuple(places)


@contextmanager
def watched(copies: Iterable[tuple[Any, Tensor]], wrote: Callable[[Any, Tensor], None]) -> Iterator[None]:
    """Call ``wrote`` with each of these, a tensor that stands for something and the one that is handed out for it, if
    the latter is written to inside. Whatever the writer is called, torch counts its writes.
    """
    counted = [(stand_in, copy, writes_to(copy)) for stand_in, copy in copies]
    yield
    for stand_in, copy, count in counted:
        if writes_to(copy) != count:
            wrote(stand_in, copy)


def writes_to(tensor: Tensor) -> int:
    """Torch's count of them; tensors of inference have none."""
    return 0 if tensor.is_inference() else tensor._version


def each(value: Any) -> list[Any]:
    """``value`` as a list: its elements, itself, or nothing for None."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def has_other_stand_ins(types: Sequence[type], *own: type) -> bool:
    """Whether the call has tensors of further classes that stand for something; see [Note: several classes]."""
    return len(types) > 1 and any(hasattr(kind, "_stand_in") and not issubclass(kind, own) for kind in types)


def call(func: Any, args: Any, kwargs: Mapping[str, Any], *, ask: bool) -> Any:
    """Call ``func``; ``ask``: with the handlers of other classes, which are switched off inside a handler."""
    if not ask:
        return func(*args, **kwargs)
    with torch._C._EnableTorchFunction():
        return func(*args, **kwargs)


def with_values(
    func: Any,
    types: Sequence[type],
    args: Any,
    kwargs: Any,
    own: type,
    value: Callable[[Any], Tensor],
    kind: type[Tensor],
    wrote: Callable[[Any, Tensor], None],
) -> Any:
    """Call ``func`` with values for its tensors of class ``own``; what shares memory with them becomes a ``kind``.
    ``wrote`` is called with each of them whose value was written to, and with that value. What returns a tensor that it
    was given returns the one that stood for it.
    """
    values: dict[int, tuple[Any, Tensor]] = {}  # one of each tensor, wherever it is given

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) not in values:
            values[id(tensor)] = tensor, value(tensor)
        return values[id(tensor)][1]

    args, kwargs = tree_map_only(own, read, (args, kwargs))
    copies = [(stand_in, copy) for stand_in, copy in values.values() if copy is not stand_in]
    with watched(copies, wrote):
        out = call(func, args, kwargs, ask=has_other_stand_ins(types, own))
    for stand_in, copy in copies:
        if out is copy:
            return stand_in
    return read_only(func, out, [copy for _, copy in copies], kind)


def replace_views(out: Any, home: tuple[int, int], do: Callable[[Tensor], Tensor]) -> Any:
    """``out`` with each of its tensors that begins between these addresses replaced by ``do`` of it."""
    begin, end = home

    def look(tensor: Tensor) -> Tensor:
        return do(tensor) if tensor.layout is torch.strided and begin <= tensor.data_ptr() < end else tensor

    if isinstance(out, Tensor):  # mostly
        return look(out)
    return tree_map_only(Tensor, look, out) if isinstance(out, list | tuple | dict) else out


def read_only(func: Any, out: Any, copies: Sequence[Tensor], kind: type[Tensor]) -> Any:
    """Make what shares memory with ``copies`` in ``out`` read-only: tensors become a ``kind``, arrays refuse writes."""
    if func in ARRAYS:
        out.setflags(write=False)
        return out

    def as_kind(tensor: Tensor) -> Tensor:
        tensor.__class__ = kind  # not as_subclass, which would add a node to the graph
        return tensor

    for copy in copies:
        out = replace_views(out, (copy.data_ptr(), copy.data_ptr() + copy.nbytes), as_kind)
    return out
