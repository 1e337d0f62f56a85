"""Codecs: what the bits of each number format mean (``core/formats.py`` has how many there are).

State (``STATE``) is AdamW's two moments. A chunk of them is decoded into fp32, updated there by the unchanged rule, and
encoded again:

    bf16   the upper half of fp32. Masters in bf16 are the same, whatever moments are
    int8   first moment: sign(q) * q^2 * scale, q from -127 to 127, with one scale per block: its largest size / 127^2,
           with 10 significant bits, so that all products are exact in fp32. Squares keep what is small beside the
           largest: an input feature 100 times larger than the others makes gradients 100 times larger in every row of
           a matrix, and so in every block
           second moment: 5 bits of exponent and 3 of mantissa, counted from the lowest that the block has a code for;
           the scale is that lowest one, as a whole number. What is below 2^-32 of the block's largest number gets the
           lowest code, and never zero, since the update divides by the root. A block that is all zero stays so

All round stochastically: up with a probability that is the distance from the lower neighbour. Of a first moment in int8
the root is rounded so, which adds a quarter of a scale at most to the mean. A second moment changes by 1 - beta2 of
itself per update, far less than two neighbours differ, and a weight by the learning rate. Rounded to the nearest
neighbour they would never change.

Invariant of state. ``encode(decode(codes)) == codes`` for every noise. A quotient by a scale that was rounded itself
lies slightly beside a whole number; therefore noise leaves out ``margin`` at both ends. So checkpoints can have moments
in fp32, and resuming from them changes no bit. Bytes of zero decode to zero: new state is zero.

Frozen weights (``WEIGHTS``) are encoded once, before training, and decoded on the device each time that they are used:

    fp8    a byte (e4m3: 4 significant bits), and a scale for each block: the least power of two by which its largest
           number comes to 448, the largest of e4m3, at most. So scales are exact in bfloat16

Invariant of frozen weights. Decoded, they are exact in bfloat16 and in float32, and the same on every device. A weight
that was encoded once is encoded to itself.

bitsandbytes' 8-bit map of moments has levels in powers of ten. Quantising to it takes a search per element, five times
the time of all that is done here (benchmarks/records/moments.md). Squares are as near to fp32 as its map
is, and our second moments nearer (tests/unit/test_moments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepstow.strategies.core.formats import FORMATS

CHUNK_BLOCKS = 1 << 15  # of a frozen weight that are encoded at a time
_FLUSHED = 2.0**-80  # a block of first moments with nothing larger becomes zero: too small to change a weight
_LARGEST_SQUARE = 127**2
_DROPPED_BITS = 14  # of fp32's mantissa, which a scale of first moments does not have
# Added to the bits of a float32 it carries into the exponent where the mantissa is above 1.75; 448 = 1.75 * 2^8.
_CARRY_ABOVE_1_75, _MANTISSA_BITS = 0x1FFFFF, 23
_LIMIT = 2.0**127


class Moment(Protocol):
    """How one moment is stored. ``codes``: uint8, a row of bytes for each block, or one row without blocks. ``scales``:
    one per row, in the dtype that ``State`` says; a codec may keep other bits in them.
    """

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor | None) -> None:
        """Write the numbers to ``out``, float32, of as many rows. ``spare``: other memory of that shape, or None."""

    def encode(self, values: Tensor, noise: Tensor, codes: Tensor, scales: Tensor, spare: Tensor | None) -> None:
        """Round ``values``, which may be spoiled. ``noise``: whole numbers (int32) of ``noise_bits`` bits."""


@dataclass(frozen=True, slots=True)
class State:
    """The codec of AdamW's two moments. Noise is whole numbers, uniform from ``margin`` to 2^``noise_bits`` -
    ``margin``. ``scale``: the dtype of scales.
    """

    first: Moment
    second: Moment
    noise_bits: int
    margin: int = 0
    scale: torch.dtype = torch.float32

    @property
    def moments(self) -> tuple[Moment, Moment]:
        return self.first, self.second


class Weights(Protocol):
    """How a frozen weight is stored: codes and scales of blocks of float32 or bfloat16."""

    codes: torch.dtype
    scales: torch.dtype

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The codes, a row for each block, and the scale of each. ValueError if a number is not finite, or so large
        that rounding it might make it so.
        """

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the numbers of each block to a row of ``out``, in its dtype. Memory of the device is planned: what is
        made on the way is small beside ``out``.
        """


class UpperHalf:
    """bf16: fp32 without its last 16 bits."""

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor | None) -> None:
        out.copy_(codes.view(torch.bfloat16))

    def encode(self, values: Tensor, noise: Tensor, codes: Tensor, scales: Tensor, spare: Tensor | None) -> None:
        codes.view(torch.int16).copy_(values.view(torch.int32).add_(noise).bitwise_right_shift_(16))


class Squares:
    """int8, first moment: squares of whole numbers with a sign, times a scale."""

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor | None) -> None:
        out.copy_(codes.view(torch.int8))
        out.mul_(torch.abs(out, out=spare)).mul_(scales)

    def encode(self, values: Tensor, noise: Tensor, codes: Tensor, scales: Tensor, spare: Tensor | None) -> None:
        roots = torch.abs(values, out=spare)
        largest = roots.amax(1, keepdim=True)
        scales.copy_(largest / _LARGEST_SQUARE)
        scale_bits = scales.view(torch.int32)
        scale_bits.add_(1 << (_DROPPED_BITS - 1)).bitwise_right_shift_(_DROPPED_BITS).bitwise_left_shift_(_DROPPED_BITS)
        # The root with 20 bits behind the point.
        roots.mul_(torch.where(largest > _FLUSHED, _LARGEST_SQUARE * 2.0**40 / largest, 0.0)).sqrt_()
        torch.copysign(roots, values, out=values)
        bits = values.view(torch.int32).copy_(values)
        codes.view(torch.int8).copy_(bits.add_(noise).bitwise_right_shift_(20))


class Exponents:
    """int8, second moment: exponents and three bits of mantissa, from the least that the block has."""

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor | None) -> None:
        out.view(torch.int32).copy_(codes).add_(scales.view(torch.int32)).bitwise_left_shift_(20)

    def encode(self, values: Tensor, noise: Tensor, codes: Tensor, scales: Tensor, spare: Tensor | None) -> None:
        bits = values.view(torch.int32).add_(noise).bitwise_right_shift_(20)
        base = scales.view(torch.int32).copy_(bits.amax(1, keepdim=True)).sub_(255).clamp_(min=0)
        codes.copy_(bits.sub_(base).clamp_(min=0))


class E4M3:
    """fp8 with a scale that is a power of two."""

    codes = torch.float8_e4m3fn
    scales = torch.bfloat16

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        largest = blocks.abs().amax(1).float()
        if not (largest < _LIMIT).all():
            raise ValueError(f"a frozen weight has NaN, infinity or a number above {_LIMIT:.1e} in it")
        exponents = (((largest.view(torch.int32) + _CARRY_ABOVE_1_75) >> _MANTISSA_BITS) - 8).clamp_(min=1)
        scales = (exponents << _MANTISSA_BITS).view(torch.float32)
        return (blocks / scales.to(blocks.dtype)[:, None]).to(self.codes), scales.to(self.scales)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes)
        out.mul_(scales[:, None])


MASTERS = UpperHalf()
STATE: Mapping[str, State] = {
    "bf16": State(UpperHalf(), UpperHalf(), noise_bits=16),
    "int8": State(Squares(), Exponents(), noise_bits=20, margin=1 << 12),
}
WEIGHTS: Mapping[str, Weights] = {"fp8": E4M3()}


class EncodedWeights:
    """``elements`` weights, padded up to whole blocks, in ``memory``: bytes of codes, and behind them the scales."""

    def __init__(self, format_: str, memory: Tensor, elements: int) -> None:
        self._format = FORMATS[format_]
        self._codec = WEIGHTS[format_]
        self.memory = memory[: self._format.num_bytes(elements)]
        end = self._format.code_bytes(elements)
        self._codes = self.memory[:end].view(self._codec.codes).view(self._format.blocks(elements), -1)
        self._scales = self.memory[end:].view(self._codec.scales)

    def put(self, start: int, weight: Tensor) -> None:
        """Encode ``weight``, which begins at element ``start``, where a block begins."""
        first, flat = start // self._format.block, weight.detach().reshape(-1)
        for chunk in flat.split(CHUNK_BLOCKS * self._format.block):
            codes, scales = self._codec.encode(_blocks(chunk, self._format.block))
            self._codes[first : first + len(codes)] = codes
            self._scales[first : first + len(codes)] = scales
            first += len(codes)

    def get(self, start: int, like: Tensor) -> Tensor:
        """A copy of the weight that begins at ``start``, in the shape and dtype of ``like``."""
        first, count = start // self._format.block, self._format.blocks(like.numel())
        blocks = self._codes.new_empty(count, self._format.block, dtype=like.dtype)
        self._codec.decode(self._codes[first : first + count], self._scales[first : first + count], blocks)
        return blocks.view(-1)[: like.numel()].view(like.shape)

    def decode(self, out: Tensor) -> None:
        """All weights, into ``out``, flat and as long."""
        self._codec.decode(self._codes, self._scales, out.view(len(self._codes), -1))


@torch.no_grad()
def once_encoded(weight: Tensor, format_: str) -> Tensor:
    """``weight`` as it is after its way through a format for frozen weights, in its shape and dtype."""
    rounded = weight.detach().clone().reshape(-1)
    flat = weight.detach().reshape(-1)
    block = FORMATS[format_].block
    for start in range(0, flat.numel(), CHUNK_BLOCKS * block):
        chunk = flat[start : start + CHUNK_BLOCKS * block]
        blocks = _blocks(chunk, block)
        decoded = torch.empty_like(blocks)
        WEIGHTS[format_].decode(*WEIGHTS[format_].encode(blocks), decoded)
        rounded[start : start + chunk.numel()] = decoded.view(-1)[: chunk.numel()]
    return rounded.view(weight.shape)


def _blocks(flat: Tensor, block: int) -> Tensor:
    """``flat`` in rows of ``block`` numbers, zero-padded to a multiple of it."""
    return pad(flat, (0, -flat.numel() % block)).view(-1, block)
