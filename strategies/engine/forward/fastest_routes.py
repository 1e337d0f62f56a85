"""Measure which route is the fastest for each product of a linear layer.

A product is timed as training calls it, including any transposition of its operands, on more sets of operands than
caches hold. The routes of a product take turns, and the least of each route's seconds counts: other work disturbs
single rounds, and a machine that slows down does so for all. A route whose result differs too much from torch's is left
out.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from deepstow.strategies.core.facts import Precision, RunFacts
from deepstow.strategies.engine.forward.routed_linear import NATIVE, ROUTES, Routes, product, storage_of

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
    """The routes of those ``layers`` that another one than torch's makes faster; the same on all ranks."""
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
