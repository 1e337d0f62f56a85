"""Measure how fast this machine computes each product of a linear layer over each route.

A product is timed as training calls it, including any transposition of its operands. In training some operands have
just been written (the input in forward, the gradient in backward) and are in a cache; the others were used long ago.
So products rotate through several sets of operands, more than caches hold, and on a CPU the recent operand is read
before the clock starts. An accelerator runs many products per reading instead, for its caches are small beside them.

The routes of a shape take turns, and the least of each route's seconds counts: other work disturbs single rounds, and a
machine that slows down does so for all routes. A route whose result differs too much from torch's own is left out.

Besides products a shape is timed for writing the second copy, and for a forward and backward of a tiny layer, stock and
routed, whose difference is what routing costs in itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from strategies.core.linears import ELEMENT_BYTES, LEGAL, Gemm, Route, Routes, Shape, Timed
from strategies.core.sizes import human_duration

Product = tuple[Gemm, Route] | str
Operands = dict[str, Any]
Timer = Callable[[], float]  # runs something and returns its seconds
Say = Callable[[str], None]
REFRESH, STOCK, ROUTED = "refresh", "stock", "routed"  # what is timed besides products

ROUNDS = 10
HOPELESS = 1.3  # times the fastest: a route slower than this after two rounds is not timed again
ROTATED_BYTES, MOST_SETS = 256 << 20, 8  # of operands that are used before one is used again
LEAST_TIMED_CPU_S, LEAST_TIMED_S = 2e-5, 5e-4  # of one reading; shorter products are repeated because clocks are coarse
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-12}  # of the largest result
OPERANDS = {Gemm.FORWARD: ("x", "weight"), Gemm.DGRAD: ("grad", "weight"), Gemm.WGRAD: ("grad", "x")}


def tune(
    shapes: Sequence[Shape],
    prepare: Callable[[Shape], Mapping[Product, Timer]],
    budget_s: float,
    say: Say,
    clock: Timer = time.perf_counter,
) -> dict[Shape, Timed]:
    """Time ``shapes`` in this order until the budget is spent; the first one always.

    Args:
        prepare: gives the timers of a shape.
    """
    began_s, longest_s, failed = clock(), 0.0, 0
    found: dict[Shape, Timed] = {}
    for number, shape in enumerate(shapes, start=1):
        spent_s = clock() - began_s
        if found and spent_s + longest_s > budget_s:
            break
        say(f"measuring linear layers, {number} of {len(shapes)}: {shape}; {spent_s:.0f} of {budget_s:g} s")
        try:
            found[shape] = _timed(shape, prepare(shape), (budget_s - spent_s) / 2, clock)
        except RuntimeError as error:  # no memory for the operands, no kernel for the dtype
            failed += 1
            say(f"{shape} stays native, it could not be measured: {str(error).splitlines()[0]}")
        longest_s = max(longest_s, clock() - began_s - spent_s)
    left = len(shapes) - len(found) - failed
    rest = f"; {left} were not reached and stay native: raise strategies.linear.budget_s" if left else ""
    say(f"measured {len(found)} shapes of linear layers in {human_duration(clock() - began_s)}{rest}")
    return found


def _timed(shape: Shape, timers: Mapping[Product, Timer], most_s: float, clock: Timer) -> Timed:
    """The least seconds of several rounds; of at least two, if they take longer than ``most_s``."""
    least = dict.fromkeys(timers, math.inf)
    began_s = clock()
    for number in range(ROUNDS):
        round_s = clock()
        fastest = {gemm: min(least[other] for other in least if other[0] is gemm) for gemm in Gemm}
        for product, timer in timers.items():
            behind = isinstance(product, tuple) and least[product] > HOPELESS * fastest[product[0]]
            if number < 2 or not behind or product[1] is Route.NATIVE:
                least[product] = min(least[product], timer())
        if number >= 1 and clock() + (clock() - round_s) - began_s > most_s:
            break
    seconds = tuple((gemm, route, least[gemm, route]) for gemm in Gemm for route in Route if (gemm, route) in least)
    return Timed(shape, seconds, least[REFRESH], max(0.0, least[ROUTED] - least[STOCK]))


def timers_of(shape: Shape, device: str) -> dict[Product, Timer]:
    """Timers of every product over every legal route that gives torch's result, and of ``REFRESH``, ``STOCK`` and
    ``ROUTED``.
    """
    sets = _operands(shape, device)
    timers: dict[Product, Timer] = {}
    for gemm in Gemm:
        expected = compute(shape, gemm, Route.NATIVE, sets[0]).float()
        allowed = TOLERANCE[shape.dtype] * math.sqrt(shape.rows) * max(float(expected.abs().max()), 1e-30)
        for route in LEGAL[gemm]:
            work = partial(compute, shape, gemm, route)
            if float((work(sets[0]).float() - expected).abs().max()) <= allowed:
                timers[gemm, route] = _timer(work, sets, device, OPERANDS[gemm][0])
    timers[REFRESH] = _timer(lambda operands: operands["copy"].copy_(operands["weight"].t()), sets, device)
    return timers | _overhead_timers(device)


def compute(shape: Shape, gemm: Gemm, route: Route, operands: Operands) -> Any:
    """One product, computed as a routed layer does it."""
    from strategies.engine.routed_linear import product

    first, second = (operands[name] for name in OPERANDS[gemm])
    return product(gemm, route, shape.stored, first, operands["copy"].t() if route is Route.COPY else second)


def _operands(shape: Shape, device: str) -> list[Operands]:
    import torch

    elements = 2 * shape.inputs * shape.outputs + shape.rows * (shape.inputs + shape.outputs)
    count = -(-ROTATED_BYTES // (elements * ELEMENT_BYTES[shape.dtype]))
    noise = partial(
        torch.randn,
        generator=torch.Generator(device).manual_seed(0),
        device=device,
        dtype=getattr(torch, shape.dtype),
    )
    widths = (shape.outputs, shape.inputs) if shape.stored == "out_in" else (shape.inputs, shape.outputs)
    sets: list[Operands] = [
        {"x": noise(shape.rows, shape.inputs), "grad": noise(shape.rows, shape.outputs), "weight": noise(*widths)}
        for _ in range(min(MOST_SETS, count))
    ]
    return [{**each, "copy": each["weight"].t().contiguous()} for each in sets]


def _overhead_timers(device: str) -> dict[Product, Timer]:
    """A forward and backward of a layer that is so small that its products cost nothing."""
    import torch
    from torch import nn

    from strategies.engine.routed_linear import route

    x = torch.zeros(1, 2, 8, device=device, requires_grad=True)
    grad = torch.zeros(1, 2, 8, device=device)
    layers = nn.ModuleDict({name: nn.Linear(8, 8, bias=False, device=device) for name in (STOCK, ROUTED)})
    route(layers, {ROUTED: Routes(wgrad=Route.LEFT)})

    def step(operands: Operands) -> None:
        operands["layer"](x).backward(grad)

    return {name: _timer(step, [{"layer": layer}], device) for name, layer in layers.items()}


def _timer(work: Callable[[Operands], Any], sets: Sequence[Operands], device: str, recent: str | None = None) -> Timer:
    """Times ``work`` on the next sets of operands, as often as the clock needs.

    Args:
        recent: the operand that training has just written.
    """
    import torch

    rotation, times = cycle(sets), 1
    least_s = LEAST_TIMED_CPU_S if device == "cpu" else LEAST_TIMED_S
    wait: Callable[[], object] = (lambda: None) if device == "cpu" else torch.accelerator.synchronize

    def run() -> float:
        nonlocal times
        while True:
            batch = [next(rotation) for _ in range(times)]
            if recent and device == "cpu":
                batch[0][recent].sum()
            wait()
            began_s = time.perf_counter()
            for operands in batch:
                work(operands)
            wait()
            taken_s = time.perf_counter() - began_s
            if taken_s >= least_s or times >= 1 << 12:
                return taken_s / times
            times *= max(2, min(16, math.ceil(1.5 * least_s / max(taken_s, 1e-9))))

    return run
