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

import math
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from deepstow.strategies.core.facts import Precision, RunFacts

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


# --- which route is the fastest --------------------------------------------------------------------------------------

MARGIN = 0.03  # smaller gains may reverse in the next measurement
ROUTING_S = 15e-6  # of a forward and backward in Python; 13 measured on two cores of an Intel Xeon, 8 x 8 weights
BUDGET_S = 20.0  # shapes that are not reached stay native
ROUNDS = 8
ROTATED_BYTES = 256 << 20  # of operands that are used before one is used again
MOST_SETS = 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float64: 1e-12}  # of the largest
COMPUTES_IN = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


class Shape(NamedTuple):
    """All that a timing depends on: tokens of a micro-batch, widths, layout of the weight, dtype, if it is trained."""

    rows: int
    inputs: int
    outputs: int
    stored: str
    dtype: torch.dtype
    trains: bool


def measured(layers: Mapping[str, nn.Module], run: RunFacts) -> dict[str, Routes]:
    """The routes of those ``layers`` that another one than torch's makes faster; the same on all ranks.

    A product is timed as training calls it, including any transposition of its operands, on more sets of operands than
    caches hold. The routes of a product take turns, and the least of each route's seconds counts: other work disturbs
    single rounds, and a machine that slows down does so for all. A route whose result differs too much from torch's is
    left out.
    """
    shapes = {path: _shape(layer, run) for path, layer in layers.items()}
    counts = Counter(shapes.values())
    ordered = sorted(counts, key=lambda shape: counts[shape] * shape.inputs * shape.outputs, reverse=True)
    accelerator = torch.accelerator.current_accelerator() if run.accelerated else None
    device, ends_s = accelerator or torch.device("cpu"), time.perf_counter() + BUDGET_S
    mine: dict[Shape, Routes] = {}
    for shape in ordered:
        if time.perf_counter() < ends_s:
            try:
                mine[shape] = fastest(shape, device)
            except RuntimeError:  # no memory for the operands, or no kernel for the dtype
                mine[shape] = Routes()
    if accelerator is not None:
        torch.accelerator.empty_cache()
    everyones = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:  # a stage of a pipeline has shapes of its own
        everyones = [mine] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    agreed = {shape: routes for theirs in reversed(everyones) for shape, routes in theirs.items()}
    chosen = {path: agreed.get(shape, Routes()) for path, shape in shapes.items()}
    return {path: routes for path, routes in chosen.items() if routes != Routes()}


def _shape(layer: Any, run: RunFacts) -> Shape:
    stored = storage_of(layer)
    assert stored is not None, layer
    inputs, outputs = (layer.in_features, layer.out_features) if stored == "out_in" else (layer.nx, layer.nf)
    dtype = COMPUTES_IN.get(run.computes_in, layer.weight.dtype)
    return Shape(run.micro_batch * run.sequence, inputs, outputs, stored, dtype, layer.weight.requires_grad)


def fastest(shape: Shape, device: torch.device) -> Routes:
    """The fastest routes, if each gains more than the margin, and all together more than routing costs."""
    seconds = {gemm: _seconds(gemm, shape, device) for gemm in Routes._fields if gemm != "wgrad" or shape.trains}
    best = {gemm: min(timed, key=timed.__getitem__) for gemm, timed in seconds.items()}
    gains = {gemm: timed[NATIVE] - timed[best[gemm]] for gemm, timed in seconds.items()}
    pays = {gemm: gain for gemm, gain in gains.items() if gain > MARGIN * seconds[gemm][NATIVE]}
    native = sum(timed[NATIVE] for timed in seconds.values())
    return (
        Routes(**{gemm: best[gemm] for gemm in pays}) if sum(pays.values()) - ROUTING_S > MARGIN * native else Routes()
    )


def _seconds(gemm: str, shape: Shape, device: torch.device) -> dict[str, float]:
    """Of one product over each route with torch's result."""
    weight = (shape.outputs, shape.inputs) if shape.stored == "out_in" else (shape.inputs, shape.outputs)
    sizes = (
        (shape.rows, shape.inputs if gemm == "forward" else shape.outputs),
        (shape.rows, shape.inputs) if gemm == "wgrad" else weight,
    )
    num_bytes = shape.dtype.itemsize * sum(map(math.prod, sizes))
    generator = torch.Generator(device).manual_seed(0)
    noise = partial(torch.randn, generator=generator, device=device, dtype=shape.dtype)
    sets = [[noise(*size) for size in sizes] for _ in range(min(MOST_SETS, -(-ROTATED_BYTES // num_bytes)))]
    expected = product(gemm, NATIVE, shape.stored, *sets[0]).float()
    allowed = TOLERANCE[shape.dtype] * math.sqrt(max(sizes[0])) * float(expected.abs().max())
    routes = [
        route
        for route in ROUTES
        if float((product(gemm, route, shape.stored, *sets[0]).float() - expected).abs().max()) <= allowed
    ]
    timed = dict.fromkeys([NATIVE, *routes], math.inf)
    for _ in range(ROUNDS):
        for route in timed:
            began_s = time.perf_counter()
            for operands in sets:
                product(gemm, route, shape.stored, *operands)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            timed[route] = min(timed[route], (time.perf_counter() - began_s) / len(sets))
    return timed
