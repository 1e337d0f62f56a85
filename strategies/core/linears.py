"""Linear layers as plain numbers: their shapes, their three matrix products, and the routes that a product may take.

    forward   Y = X W'   tokens x inputs  by  inputs x outputs
    dgrad     X' of G W  tokens x outputs by  outputs x inputs
    wgrad     G' X       outputs x tokens by  tokens x inputs

Two of an activation's, a weight's and a gradient's uses sum over different axes, so whatever is stored row by row is
read across its rows somewhere. A route says where: it changes in which order operands lie in memory when the product
is taken, never what is computed. A product's *left* and *right* operand are those of the formulas above; where the
weight is stored as inputs x outputs (GPT-2's ``Conv1D``), wgrad is X' G and the two change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class Gemm(Enum):
    """The three matrix products of a linear layer in training."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Route(Enum):
    """How a product is taken."""

    NATIVE = "native"  # as torch does: the flags follow from how operands lie
    FLIP = "flip"  # the transposed product of transposed operands; the result is turned
    LEFT = "left"  # the left operand is turned first
    RIGHT = "right"  # the right operand is turned first
    COPY = "copy"  # the right operand is a second, turned copy of the weight, made once per optimizer step


LEGAL = {
    Gemm.FORWARD: tuple(Route),
    Gemm.DGRAD: tuple(Route),
    Gemm.WGRAD: (Route.NATIVE, Route.FLIP, Route.LEFT, Route.RIGHT),  # no weight takes part
}


@dataclass(frozen=True, slots=True)
class Routes:
    """One route for each product of a layer."""

    forward: Route = Route.NATIVE
    dgrad: Route = Route.NATIVE
    wgrad: Route = Route.NATIVE

    def of(self, gemm: Gemm) -> Route:
        """The route of one product."""
        return {Gemm.FORWARD: self.forward, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}[gemm]

    @property
    def native(self) -> bool:
        """Whether the layer may stay as it is."""
        return self == Routes()

    @property
    def copies(self) -> bool:
        """Whether a second copy of the weight is kept."""
        return Route.COPY in (self.forward, self.dgrad)

    @property
    def reads_weight(self) -> bool:
        """Whether forward or dgrad read the weight as it is stored."""
        return self.forward is not Route.COPY or self.dgrad is not Route.COPY

    def __str__(self) -> str:
        return ", ".join(f"{gemm.value} {self.of(gemm).value}" for gemm in Gemm)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a measurement depends on: ``rows`` (tokens of a micro-batch), widths, how the weight lies, compute dtype."""

    rows: int
    inputs: int
    outputs: int
    stored: Literal["out_in", "in_out"]
    dtype: str

    @property
    def weight_bytes(self) -> int:
        """Of one copy of the weight, in the dtype of compute."""
        return self.inputs * self.outputs * ELEMENT_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.rows * self.inputs * self.outputs

    def __str__(self) -> str:
        turned = ", stored turned" if self.stored == "in_out" else ""
        return f"{self.inputs} -> {self.outputs}, {self.rows} tokens, {self.dtype}{turned}"


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer.

    Args:
        name: dotted path inside its unit; the whole path where the unit is no block.
        trains: its weight has a gradient.
        passes_back: its input needs a gradient.
        recomputed: forward runs once more in backward.
        casts: the weight is kept in another dtype than it is computed in.
        calls: uses in one forward.
    """

    name: str
    unit: str
    shape: Shape
    trains: bool = True
    passes_back: bool = True
    recomputed: bool = False
    casts: bool = False
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one product over each route, what turns operands included; of making the second copy once; and what
    a layer with routes costs more than a stock one for one forward and backward, whatever its products cost.
    """

    shape: Shape
    seconds: tuple[tuple[Gemm, Route, float], ...]
    refresh_s: float = 0.0
    overhead_s: float = 0.0

    def of(self, gemm: Gemm) -> dict[Route, float]:
        """Seconds by route; routes that gave another result are left out."""
        return {route: seconds for each, route, seconds in self.seconds if each is gemm}

    def __iter__(self) -> Iterator[tuple[Gemm, Route, float]]:
        return iter(self.seconds)
