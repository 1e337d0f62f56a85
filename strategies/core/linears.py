"""Linear layers as plain numbers: shapes, the three matrix products of training, and the routes of a product.

    forward   Y = X W'    tokens x inputs  by  inputs x outputs
    dgrad     dX = G W    tokens x outputs by  outputs x inputs
    wgrad     dW = G' X   outputs x tokens by  tokens x inputs

A matrix that is stored row by row is read across its rows in one of its two products. A route decides how the operands
lie in memory; the result stays the same. *Left* and *right* operands are those of the formulas above. Where the weight
is stored as inputs x outputs (GPT-2's ``Conv1D``), wgrad is X' G, so left and right change places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class Gemm(StrEnum):
    """The three matrix products of a linear layer in training."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Route(StrEnum):
    """How a product is computed."""

    NATIVE = "native"  # as torch does it
    FLIP = "flip"  # as the product of the transposed operands, whose result is transposed back
    LEFT = "left"  # after transposing the left operand in memory
    RIGHT = "right"  # after transposing the right operand in memory
    COPY = "copy"  # from a transposed copy of the weight, written once per optimizer step


# wgrad does not read the weight.
LEGAL = {gemm: tuple(route for route in Route if (gemm, route) != (Gemm.WGRAD, Route.COPY)) for gemm in Gemm}


@dataclass(frozen=True, slots=True)
class Routes:
    """One route for each product of a layer."""

    forward: Route = Route.NATIVE
    dgrad: Route = Route.NATIVE
    wgrad: Route = Route.NATIVE

    def of(self, gemm: Gemm) -> Route:
        route: Route = getattr(self, gemm)
        return route

    @property
    def copies(self) -> bool:
        """Whether a second copy of the weight is kept."""
        return Route.COPY in (self.forward, self.dgrad)

    def __str__(self) -> str:
        return ", ".join(f"{gemm} {self.of(gemm)}" for gemm in Gemm)


NATIVE = Routes()  # the layer stays as it is


@dataclass(frozen=True, slots=True)
class Shape:
    """All that a timing depends on: ``rows`` (tokens of a micro-batch), widths, weight layout, dtype of compute."""

    rows: int
    inputs: int
    outputs: int
    stored: Literal["out_in", "in_out"]
    dtype: str

    @property
    def weight_bytes(self) -> int:
        """In the dtype of compute."""
        return self.inputs * self.outputs * ELEMENT_BYTES[self.dtype]

    def __str__(self) -> str:
        turned = ", stored turned" if self.stored == "in_out" else ""
        return f"{self.inputs} -> {self.outputs}, {self.rows} tokens, {self.dtype}{turned}"


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer. ``name`` is its path inside the unit, the whole path if that is no block."""

    name: str
    unit: str
    shape: Shape
    trains: bool = True  # its weight needs a gradient
    passes_back: bool = True  # its input needs a gradient
    recomputed: bool = False  # forward runs once more in backward
    casts: bool = False  # the weight is kept in another dtype than the dtype of compute
    calls: int = 1  # in one forward


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of each product of a shape over each route that has the right result, transpositions included, and
    those to write the second copy once. ValueError if they are not numbers of seconds, or the native route has none.
    """

    shape: Shape
    seconds: tuple[tuple[Gemm, Route, float], ...]
    refresh_s: float = 0.0

    def __post_init__(self) -> None:
        taken = all(0 < seconds < math.inf for *_, seconds in self.seconds) and 0 <= self.refresh_s < math.inf
        if not taken or not all(Route.NATIVE in self.of(gemm) for gemm in Gemm):
            raise ValueError("seconds must be positive, and every product has a native route")

    def of(self, gemm: Gemm) -> dict[Route, float]:
        """Seconds of one product by route."""
        return {route: seconds for each, route, seconds in self.seconds if each is gemm}
