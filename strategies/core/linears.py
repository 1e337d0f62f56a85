"""Linear layers as plain numbers: shapes, the three matrix products of training, and the routes of a product.

    forward   Y = X W'    tokens x inputs  by  inputs x outputs
    dgrad     dX = G W    tokens x outputs by  outputs x inputs
    wgrad     dW = G' X   outputs x tokens by  tokens x inputs

A matrix that is stored row by row is read across its rows in one of its two products. A route decides how the operands
lie in memory; the result stays the same. *Left* and *right* operands are those of the formulas above. Where the weight
is stored as inputs x outputs (GPT-2's ``Conv1D``), wgrad is X' G, so left and right change places.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

# Seconds of a shape: each product over each route, as in "forward flip", and writing the second copy once: "copy".
Timing = dict[str, float]
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
Gemm = StrEnum("Gemm", ["FORWARD", "DGRAD", "WGRAD"])


class Route(StrEnum):
    """How a product is computed."""

    NATIVE = "native"  # as torch does it
    FLIP = "flip"  # as the product of the transposed operands, whose result is transposed back
    LEFT = "left"  # after transposing the left operand in memory
    RIGHT = "right"  # after transposing the right operand in memory
    COPY = "copy"  # from a transposed copy of the weight, written once per optimizer step; not for wgrad


LEGAL = {gemm: tuple(route for route in Route if (gemm, route) != (Gemm.WGRAD, Route.COPY)) for gemm in Gemm}


class Routes(NamedTuple):
    """One route for each product of a layer, in the order of ``Gemm``."""

    forward: Route = Route.NATIVE
    dgrad: Route = Route.NATIVE
    wgrad: Route = Route.NATIVE

    def __str__(self) -> str:
        return ", ".join(f"{gemm} {route}" for gemm, route in self._asdict().items())


NATIVE = Routes()  # the layer stays as it is


@dataclass(frozen=True, slots=True)
class Shape:
    """All that a timing depends on: ``rows`` (tokens of a micro-batch), widths, weight layout, dtype of compute."""

    rows: int
    inputs: int
    outputs: int
    stored: Literal["out_in", "in_out"]
    dtype: str

    def __str__(self) -> str:
        turned = ", stored turned" if self.stored == "in_out" else ""
        return f"{self.inputs} -> {self.outputs}, {self.rows} tokens, {self.dtype}{turned}"


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer, by its path in the model."""

    name: str
    unit: str
    shape: Shape
    trains: bool = True  # its weight needs a gradient
    passes_back: bool = True  # its input needs a gradient
    recomputed: bool = False  # forward runs once more in backward
    calls: int = 1  # in one forward
