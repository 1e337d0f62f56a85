"""Linear layers whose products take other routes than torch's.

    forward   Y = X W'    tokens x inputs  by  inputs x outputs
    dgrad     dX = G W    tokens x outputs by  outputs x inputs
    wgrad     dW = G' X   outputs x tokens by  tokens x inputs

A route decides how the operands lie in memory; the result stays the same. *Left* and *right* operands are those of the
formulas. Where the weight is stored as inputs x outputs (GPT-2's ``Conv1D``), wgrad is X' G, so they change places.

The class of a routed layer becomes a subclass that differs in ``forward`` only, so names, shapes, state dict and
``isinstance`` do not change. In eval mode the stock ``forward`` runs. Backward saves the weight as the parameter, no
view of it, so it reads what an engine that moves weights has put there by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

STORED = {("torch.nn.modules.linear", "Linear"): "out_in", ("transformers.pytorch_utils", "Conv1D"): "in_out"}
NATIVE = "native"  # as torch does it
FLIP = "flip"  # as the product of the transposed operands, whose result is transposed back
LEFT, RIGHT = "left", "right"  # after transposing that operand in memory
ROUTES = (NATIVE, FLIP, LEFT, RIGHT)


class Routes(NamedTuple):
    """One route for each product of a layer."""

    forward: str = NATIVE
    dgrad: str = NATIVE
    wgrad: str = NATIVE

    def __str__(self) -> str:
        return ", ".join(f"{gemm} {route}" for gemm, route in self._asdict().items())


def storage_of(module: nn.Module) -> str | None:
    """The layout of a linear layer's weight, "out_in" or "in_out"; None for any other module."""
    return STORED.get((type(module).__module__, type(module).__name__))


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of ``model`` by dotted path, without those of quantised weights."""
    return {
        path: module
        for path, module in model.named_modules()
        if storage_of(module) and type(module.weight) is nn.Parameter and module.weight.is_floating_point()
    }


def transposed(matrix: Tensor) -> Tensor:
    """The same matrix with rows and columns exchanged in memory."""
    return matrix.t().contiguous().t() if matrix.stride(-1) == 1 else matrix.contiguous()


def product(gemm: str, route: str, stored: str, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product of a layer, row-major. ``first``: input ``[..., I]`` in forward; gradient ``[T, O]`` in dgrad and
    wgrad. ``second``: weight as ``stored``; input ``[T, I]`` in wgrad.
    """
    if (gemm, route, stored) == ("forward", NATIVE, "out_in"):
        return F.linear(first, second, bias)  # the call of the stock layer
    if gemm == "wgrad":
        left, right = (first.t(), second) if stored == "out_in" else (second.t(), first)
    else:
        left = first.reshape(-1, first.shape[-1])
        right = second.t() if (gemm == "forward") == (stored == "out_in") else second
    if route == FLIP:
        operands = right.t(), left.t()
        flipped = torch.mm(*operands) if bias is None else torch.addmm(bias.unsqueeze(1), *operands)
        return flipped.t().contiguous()
    left = transposed(left) if route == LEFT else left
    right = transposed(right) if route == RIGHT else right
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Routed) -> Tensor:
        ctx.layer = layer
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        out = product("forward", layer._routes.forward, layer._stored, x, weight, bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        routes = ctx.layer._routes
        stored = ctx.layer._stored
        rows = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        into_x = into_weight = None
        if needs_x:
            into_x = product("dgrad", routes.dgrad, stored, rows, weight)
            into_x = into_x.view(*grad.shape[:-1], into_x.shape[-1])
        if needs_weight:
            into_weight = product("wgrad", routes.wgrad, stored, rows, x.reshape(-1, x.shape[-1]))
        return into_x, into_weight, rows.sum(0) if needs_bias else None, None


class Routed(nn.Module):
    """The mixin that ``route`` puts before the class of a layer."""

    _routes: Routes
    _stored: str
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Any:
        """Compute what the stock layer computes, under autocast as well."""
        if not self.training:
            return super().forward(x)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _Products.apply(x, weight, bias, self)


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
        module._routes = routes
        module._stored = stored
