"""The matrix products of a linear layer as something that can be timed: operands as training has them, on the device.

What training has just written, a layer's input in forward and its gradient in backward, is in a cache; the weight, and
in wgrad the input, were last used long ago. So products are taken on several sets of operands in turn, more than caches
hold, and on a CPU the one operand that would be in a cache is read before the clock starts. (An accelerator gets many
products at a time, or the clock would be measured; its caches are small beside its operands.)

What a layer with routes costs whatever it computes is the difference of two tiny layers, one stock and one routed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from strategies.core.linears import ELEMENT_BYTES, Gemm, Route, Routes, Shape
from strategies.planner.gemm_routes import legal

if TYPE_CHECKING:
    from torch import Tensor

Product = tuple[Gemm, Route] | str
Operands = dict[str, Any]
# No products, but timed with them: the second copy; a forward and backward of a tiny layer, stock and routed.
REFRESH, STOCK, ROUTED = "refresh", "stock", "routed"

ROTATED_BYTES = 256 << 20  # operands that are gone through before one comes again: more than caches hold
MOST_SETS = 8
# A single reading, on a CPU and on an accelerator; shorter products are repeated, for the clock is coarse.
LEAST_TIMED_CPU_S, LEAST_TIMED_S = 2e-5, 5e-4
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-12}  # of the largest result
WARM = {Gemm.FORWARD: "x", Gemm.DGRAD: "grad", Gemm.WGRAD: "grad"}


class Bench:
    """Runs products on the device and reads the clock."""

    def __init__(self, device: str) -> None:
        self.device = device

    def prepare(self, shape: Shape, *, copies: bool = True) -> dict[Product, Callable[[], float]]:
        """What ``tune`` takes: every legal product that gives what torch's own gives."""
        sets = list(self._sets(shape))
        runs: dict[Product, Callable[[], float]] = {}
        for gemm in Gemm:
            expected = None
            for route in legal(gemm, copies=copies):
                work = _works(shape, gemm, route)
                found = work(sets[0])
                if expected is None:
                    expected = found.float()
                    scale = float(expected.abs().max()) if expected.numel() else 1.0
                worst = float((found.float() - expected).abs().max()) if found.numel() else 0.0
                if worst <= TOLERANCE[shape.dtype] * max(scale, 1e-30) * math.sqrt(max(1, shape.rows)):
                    runs[gemm, route] = self._run(work, sets, WARM[gemm])
        if copies:
            runs[REFRESH] = self._run(lambda held: held["copy"].copy_(held["weight"].t()), sets)
        return runs | self._layers()

    def _layers(self) -> dict[Product, Callable[[], float]]:
        """A forward and backward of a layer so small that what it computes costs nothing."""
        import torch
        from torch import nn

        from strategies.engine.routed_linear import route

        x = torch.zeros(1, 2, 8, device=self.device, requires_grad=True)
        grad = torch.zeros(1, 2, 8, device=self.device)
        stock = nn.Sequential(nn.Linear(8, 8, bias=False, device=self.device))
        routed = nn.Sequential(nn.Linear(8, 8, bias=False, device=self.device))
        route(routed, {"0": Routes(wgrad=Route.LEFT)})

        def run(layer: nn.Module) -> Callable[[], float]:
            return self._run(lambda held: layer(x).backward(grad), [{}])

        return {STOCK: run(stock[0]), ROUTED: run(routed[0])}

    def _sets(self, shape: Shape) -> Iterator[Operands]:
        import torch

        dtype = getattr(torch, shape.dtype)
        size = ELEMENT_BYTES[shape.dtype] * (
            2 * shape.inputs * shape.outputs + shape.rows * (shape.inputs + shape.outputs)
        )
        generator = torch.Generator(self.device).manual_seed(0)

        def noise(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=self.device, dtype=dtype)

        widths = (shape.outputs, shape.inputs) if shape.stored == "out_in" else (shape.inputs, shape.outputs)
        for _ in range(max(1, min(MOST_SETS, -(-ROTATED_BYTES // size)))):
            weight = noise(*widths)
            yield {
                "x": noise(shape.rows, shape.inputs),
                "grad": noise(shape.rows, shape.outputs),
                "weight": weight,
                "copy": weight.t().contiguous(),
            }

    def _run(
        self, work: Callable[[Operands], Any], sets: Sequence[Operands], warm: str | None = None
    ) -> Callable[[], float]:
        turn, times = 0, 1
        least_s = LEAST_TIMED_CPU_S if self.device == "cpu" else LEAST_TIMED_S

        def run() -> float:
            nonlocal turn, times
            while True:
                if warm and self.device == "cpu":
                    sets[(turn + 1) % len(sets)][warm].sum()
                self._wait()
                began_s = time.perf_counter()
                for _ in range(times):
                    turn = (turn + 1) % len(sets)
                    work(sets[turn])
                self._wait()
                taken_s = time.perf_counter() - began_s
                if taken_s >= least_s or times >= 1 << 12:
                    return taken_s / times
                times *= max(2, min(16, math.ceil(1.5 * least_s / max(taken_s, 1e-9))))

        return run

    def _wait(self) -> None:
        if self.device != "cpu":
            import torch

            torch.accelerator.synchronize()


def _works(shape: Shape, gemm: Gemm, route: Route) -> Callable[[Operands], Tensor]:
    """One product as the runtime takes it."""
    from strategies.engine.routed_linear import dgrad_product, forward_product, wgrad_product

    stored = shape.stored
    if gemm is Gemm.FORWARD:
        return lambda held: forward_product(route, stored, held["x"], held["weight"], held["copy"], None)
    if gemm is Gemm.DGRAD:
        return lambda held: dgrad_product(route, stored, held["grad"], held["weight"], held["copy"])
    return lambda held: wgrad_product(route, stored, held["grad"], held["x"])
