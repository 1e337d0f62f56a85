"""Linear layers whose products take the routes of a plan.

The class of a routed layer becomes a subclass that differs in ``forward`` only, so names, shapes, state dict and
``isinstance`` do not change. In eval mode the stock ``forward`` runs. Backward saves the weight as the parameter, no
view of it, so it reads what an engine that moves weights has put there by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from deepstow.strategies.core.linears import Gemm, Route, Routes

STORED = {("torch.nn.modules.linear", "Linear"): "out_in", ("transformers.pytorch_utils", "Conv1D"): "in_out"}


def storage_of(module: nn.Module) -> str | None:
    """The layout of a linear layer's weight, "out_in" or "in_out"; None for any other module."""
    return STORED.get((type(module).__module__, type(module).__name__))


def transposed(matrix: Tensor) -> Tensor:
    """The same matrix with rows and columns exchanged in memory."""
    return matrix.t().contiguous().t() if matrix.stride(-1) == 1 else matrix.contiguous()


def product(gemm: Gemm, route: Route, stored: str, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product of a layer, row-major. ``first``: input ``[..., I]`` in forward; gradient ``[T, O]`` in dgrad and
    wgrad. ``second``: weight as ``stored``, for ``Route.COPY`` the copy's transpose; input ``[T, I]`` in wgrad.
    """
    if (gemm, route, stored) == (Gemm.FORWARD, Route.NATIVE, "out_in"):
        return F.linear(first, second, bias)  # the call of the stock layer
    if gemm is Gemm.WGRAD:
        left, right = (first.t(), second) if stored == "out_in" else (second.t(), first)
    else:
        left = first.reshape(-1, first.shape[-1])
        right = second.t() if (gemm is Gemm.FORWARD) == (stored == "out_in") else second
    if route is Route.FLIP:
        operands = right.t(), left.t()
        flipped = torch.mm(*operands) if bias is None else torch.addmm(bias.unsqueeze(1), *operands)
        return flipped.t().contiguous()
    left = transposed(left) if route is Route.LEFT else left
    right = transposed(right) if route is Route.RIGHT else right
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Routed, copy: Any) -> Tensor:
        route = layer._routes.forward
        ctx.layer, ctx.copy, ctx.version = layer, copy, None if copy is None else copy._version
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        out = product(Gemm.FORWARD, route, layer._stored, x, copy.t() if route is Route.COPY else weight, bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layer, copy = ctx.saved_tensors, ctx.layer, ctx.copy
        route, stored, rows = layer._routes.dgrad, layer._stored, grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        into_x = into_weight = None
        if route is Route.COPY and copy._version != ctx.version:
            raise RuntimeError("a weight was changed between a forward and its backward, so its second copy is another")
        if needs_x:
            if route is Route.COPY and torch.is_grad_enabled():  # differentiated in turn: the copy has no gradient
                route, weight = Route.NATIVE, weight.to(rows.dtype)
            into_x = product(Gemm.DGRAD, route, stored, rows, copy.t() if route is Route.COPY else weight)
            into_x = into_x.view(*grad.shape[:-1], into_x.shape[-1])
        if needs_weight:
            into_weight = product(Gemm.WGRAD, layer._routes.wgrad, stored, rows, x.reshape(-1, x.shape[-1]))
        return into_x, into_weight, rows.sum(0) if needs_bias else None, None, None


class Copy:
    """A transposed copy of one weight in the dtype of compute, with a stamp of what it was made of. Not an attribute
    tensor of the layer: recomputation would take it for state of the module, and refuse a forward that writes it.
    """

    changes = 0  # of the weight, unseen by autograd
    tensor: Tensor | None = None
    _stamp: tuple[object, ...] = ()

    @torch.no_grad()
    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of ``weight`` as it is now; written again, transposing and casting in one pass, if it is not."""
        stamp = (weight._version, weight.data_ptr(), self.changes, dtype, weight.device)
        if self.tensor is None:
            self.tensor = torch.empty(weight.t().shape, dtype=dtype, device=weight.device)
        if self._stamp != stamp:
            self.tensor, self._stamp = self.tensor.to(weight.device, dtype).copy_(weight.t()), stamp
        return self.tensor


class Routed(nn.Module):
    """The mixin that ``route`` puts before the class of a layer."""

    _routes: Routes
    _stored: str
    _copy: Copy | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Any:
        """Compute what the stock layer computes, under autocast as well."""
        if not self.training:
            return super().forward(x)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        dtype, device = weight.dtype, x.device.type
        if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        copy = None if self._copy is None else self._copy.of(weight, dtype)
        if not (self._routes.forward is self._routes.dgrad is Route.COPY):  # otherwise nothing reads the cast weight
            weight = weight.to(dtype)
        return _Products.apply(x, weight, bias, self, copy)


@cache
def _routed(kind: type[nn.Module]) -> Any:
    return type(f"Routed{kind.__name__}", (Routed, kind), {"__doc__": f"{kind.__name__} with routes of its own."})


def route(model: nn.Module, chosen: Mapping[str, Routes]) -> None:
    """Set the routes of the layers at these dotted paths."""
    for path, routes in chosen.items():
        module: Any = model.get_submodule(path)
        kind: Any = type(module)
        stored = storage_of(module)
        if stored is None:
            raise ValueError(f"{path} is {kind.__name__}, not a stock linear layer")
        module.__class__ = _routed(kind)
        module._routes, module._stored, module._copy = routes, stored, Copy() if Route.COPY in routes else None


def weights_changed(model: nn.Module) -> None:
    """Announce that weights of ``model`` changed unseen by autograd, as in an engine's optimizer step."""
    for module in model.modules():
        if isinstance(module, Routed) and module._copy is not None and module.weight.requires_grad:
            module._copy.changes += 1  # copies of frozen weights stay as they are
