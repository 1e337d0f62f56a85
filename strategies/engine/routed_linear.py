"""Linear layers whose products take the routes of a plan.

    forward   out [T, O] = x [T, I] times weight, plus bias
    dgrad     [T, I] = grad [T, O] times weight, turned
    wgrad     in the weight's own shape

A layer is changed in place: its class becomes a subclass of its own that differs in ``forward`` alone, so names,
shapes, state dict and ``isinstance`` stay what they were. In eval mode it is the stock layer.

The second copy. It carries the stamp of what it was made of: the weight's version (which every in-place operation that
autograd can see raises), its address, and a count of changes that autograd cannot see: fused optimizers raise no
version, nor do engines that keep weights in flat buffers, such as DeepSpeed's. Whoever drives the optimizer announces
its steps by ``weights_changed``, as our Trainer does. As long as nobody has, every backward through the layer counts as
a step: the copy is then made once per micro-batch instead of once per step, and is right in any loop. Another stamp
means another copy, made when it is next used. A backward that finds the copy made anew since its forward refuses.

The weight is saved for backward as the parameter itself, not as a view of it: where engines move weights about,
backward then reads what the parameter shows at that moment.

[Note: gradient slots] wgrad hands its result to autograd, which keeps it as ``.grad`` without a copy or adds it there,
and the memory engine then copies it into its slot. Writing it into the slot at once was left out. Adding inside the
product (beta = 1) rounds otherwise than adding afterwards, so at most the first micro-batch could gain. A slot that
buckets share may get its next tenant before autograd has summed the gradients of a weight with two uses, and what
``torch.autograd.grad`` returns would be overwritten later. The engine's promise is equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from strategies.core.linears import Route, Routes

# --- products --------------------------------------------------------------------------------------------------------


def turned(matrix: Tensor) -> Tensor:
    """The same matrix, lying the other way round in memory."""
    return matrix.t().contiguous().t() if matrix.stride(-1) == 1 else matrix.contiguous()


def product(
    route: Route, left: Tensor, right: Tensor, copied: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """``left [m, k] @ right [k, n] + bias [n]`` over ``route``; the result is row-major.

    Args:
        copied: equal to ``right``, lying the other way round; for Route.COPY.
    """
    if route is Route.FLIP:
        across = right.t(), left.t()
        flipped = torch.mm(*across) if bias is None else torch.addmm(bias.unsqueeze(1), *across)
        return flipped.t().contiguous()
    if route is Route.LEFT:
        left = turned(left)
    elif route is Route.RIGHT:
        right = turned(right)
    elif route is Route.COPY:
        assert copied is not None
        right = copied
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def forward_product(
    route: Route, stored: str, x: Tensor, weight: Tensor, copy: Tensor | None, bias: Tensor | None
) -> Tensor:
    """``[..., I] -> [..., O]``; natively by the very call that the stock layer makes."""
    if route is Route.NATIVE and stored == "out_in":
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    right, copied = (weight.t(), copy) if stored == "out_in" else (weight, None if copy is None else copy.t())
    out = product(route, rows, right, copied, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


def dgrad_product(route: Route, stored: str, grad: Tensor, weight: Tensor, copy: Tensor | None) -> Tensor:
    """``[T, O] -> [T, I]``."""
    right, copied = (weight, None if copy is None else copy.t()) if stored == "out_in" else (weight.t(), copy)
    return product(route, grad, right, copied)


def wgrad_product(route: Route, stored: str, grad: Tensor, x: Tensor) -> Tensor:
    """``[T, O]`` and ``[T, I]`` to the shape of the weight."""
    left, right = (grad, x) if stored == "out_in" else (x, grad)
    return product(route, left.t(), right)


class _Products(torch.autograd.Function):
    """The three products as one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Routed, copy: Tensor | None) -> Tensor:
        routes, stored = layer._routes, layer._stored
        ctx.routes, ctx.stored, ctx.shape, ctx.kept = routes, stored, x.shape, layer._copy
        ctx.copy = copy if routes.dgrad is Route.COPY else None
        ctx.version = None if copy is None else copy._version
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return forward_product(routes.forward, stored, x, weight, copy, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.copy is not None and ctx.copy._version != ctx.version:
            raise RuntimeError(
                "a weight was changed between a forward and its backward: its second copy is another now"
            )
        into_x = into_weight = None
        if needs_x and ctx.copy is not None and not torch.is_grad_enabled():
            into_x = dgrad_product(Route.COPY, ctx.stored, rows, ctx.copy.t(), ctx.copy).view(ctx.shape)
        elif needs_x:  # where backward is differentiated again it must see the weight, of which the copy knows nothing
            instead = Route.NATIVE if ctx.copy is not None else ctx.routes.dgrad
            into_x = dgrad_product(instead, ctx.stored, rows, weight.to(rows.dtype), None).view(ctx.shape)
        if needs_weight:
            into_weight = wgrad_product(ctx.routes.wgrad, ctx.stored, rows, x.reshape(-1, x.shape[-1]))
            if ctx.kept is not None:
                ctx.kept.passed()
        return into_x, into_weight, rows.sum(0) if needs_bias else None, None, None


# --- the second copy -------------------------------------------------------------------------------------------------


class Copy:
    """The weight of one layer, turned, in the dtype of compute."""

    def __init__(self) -> None:
        self._changes = 0
        self._announced = False  # steps are
        self._stamp: tuple[object, ...] = ()
        self._turned: Tensor | None = None

    def changed(self) -> None:
        """The weight may have been changed unseen. Whoever says so once says so always."""
        self._changes += 1
        self._announced = True

    def passed(self) -> None:
        """A backward has made a gradient of the weight."""
        if not self._announced:
            self._changes += 1

    @torch.no_grad()
    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The newest weight, turned; made anew if it is another than last time. Turning and casting are one pass."""
        stamp = (weight._version, weight.data_ptr(), self._changes)
        shape = torch.Size(reversed(weight.shape))
        held = self._turned
        if held is None or (held.shape, held.dtype, held.device) != (shape, dtype, weight.device):
            self._turned = held = torch.empty(shape, dtype=dtype, device=weight.device)
            self._stamp = ()
        if stamp != self._stamp:
            held.copy_(weight.detach().t())
            self._stamp = stamp
        return held


# --- layers ----------------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """What ``route`` mixes into the class of a layer."""

    _routes: Routes
    _stored: str
    _copy: Copy | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """As the stock layer's."""
        if not self.training:
            stock: Any = super()  # the layer's own class, which mypy does not see
            stock_out: Tensor = stock.forward(x)
            return stock_out
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        dtype = weight.dtype
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        copy = None if self._copy is None else self._copy.of(weight, dtype)
        if self._routes.reads_weight:
            weight = weight.to(dtype)
        out: Tensor = _Products.apply(x, weight, bias, self, copy)
        return out


@cache
def _routed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Routed{kind.__name__}", (Routed, kind), {"__doc__": f"{kind.__name__} with routes of its own."})


def storage_of(module: nn.Module) -> str | None:
    """How the weight of a layer lies, "out_in" or "in_out"; None where it is no linear layer that we know."""
    if type(module) is nn.Linear:
        return "out_in"
    kind = type(module)
    return "in_out" if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") else None


def route(model: nn.Module, chosen: Mapping[str, Routes]) -> None:
    """Let the layers at these dotted paths take their routes. Those that are native stay untouched.

    Raises:
        ValueError: there is no such layer, or it is no stock linear layer.
    """
    for path, routes in chosen.items():
        module: Any = model.get_submodule(path)
        stored = storage_of(module)
        if stored is None:
            raise ValueError(f"{path} is {type(module).__name__}, not a stock linear layer")
        if routes.native:
            continue
        kind: Any = type(module)
        module.__class__ = _routed(kind)
        module._routes, module._stored = routes, stored
        module._copy = Copy() if routes.copies else None


def copies_of(model: nn.Module) -> list[Routed]:
    """The layers that keep a second copy of a weight which trains."""
    routed = (module for module in model.modules() if isinstance(module, Routed))
    return [module for module in routed if module._copy is not None and module.weight.requires_grad]


def weights_changed(layers: Iterable[Routed]) -> None:
    """Call it after anything that changes weights behind autograd's back, such as an engine's optimizer step."""
    for layer in layers:
        assert layer._copy is not None
        layer._copy.changed()
