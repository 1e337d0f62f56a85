"""Frozen weights in fp8: numbers of one byte (e4m3: 4 significant bits), and a scale for each 128 of them.

``rounded`` and ``restored`` are all that says what the bytes mean: of a weight before training, of its copy on the
host, on its way up, and in tests. A scale is the least power of two by which the largest number of its block comes to
448, the largest of e4m3, at most. So scales are exact in bfloat16, restored weights are in bfloat16 and in float32,
without a second rounding and the same on every device, and a weight that was rounded once rounds to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepstow.strategies.core.fp8 import BLOCK, packed_bytes

CODES, SCALES = torch.float8_e4m3fn, torch.bfloat16
CHUNK = BLOCK << 15  # elements that are rounded at a time
# The bits of a float32: so much more makes an exponent one higher if the number is above 1.75 * 2^n = 448 * 2^(n - 8).
ABOVE, MANTISSA_BITS = 0x1FFFFF, 23
LIMIT = 2.0**127


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of ``weight``, flat and with zeros up to whole blocks, and the scale of each block. ValueError if a
    number is not finite, or so large that rounding it might make it so.
    """
    flat = weight.detach().reshape(-1)
    blocks = pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1).float()
    if not (largest < LIMIT).all():
        raise ValueError(f"a frozen weight has NaN, infinity or a number above {LIMIT:.1e} in it")
    exponents = (((largest.view(torch.int32) + ABOVE) >> MANTISSA_BITS) - 8).clamp_(min=1)
    scales = (exponents << MANTISSA_BITS).view(torch.float32)
    return (blocks / scales.to(blocks.dtype)[:, None]).to(CODES).view(-1), scales.to(SCALES)


def restored(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """The weights that ``rounded`` has made codes and scales of, in ``out``, as long and flat; nothing else is made."""
    out.copy_(codes)
    out.view(-1, BLOCK).mul_(scales[:, None])
    return out


@torch.no_grad()
def as_rounded(weight: Tensor) -> Tensor:
    """``weight`` as it is after its way through fp8, in its shape and dtype."""
    found, flat = weight.detach().clone().reshape(-1), weight.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        codes, scales = rounded(part := flat[start : start + CHUNK])
        found[start : start + CHUNK] = restored(codes, scales, codes.to(weight.dtype))[: part.numel()]
    return found.view(weight.shape)


class Codes:
    """The codes and scales of ``elements`` weights, whole blocks, in ``memory``, as bytes."""

    def __init__(self, memory: Tensor, elements: int) -> None:
        self.memory = memory[: packed_bytes(elements)]
        self._codes, self._scales = self.memory[:elements].view(CODES), self.memory[elements:].view(SCALES)

    def put(self, start: int, weight: Tensor) -> None:
        """Round ``weight``, which begins at element ``start``, where a block begins."""
        flat = weight.reshape(-1)
        for at in range(0, flat.numel(), CHUNK):
            codes, scales = rounded(flat[at : at + CHUNK])
            self._codes[start + at :][: codes.numel()] = codes
            self._scales[(start + at) // BLOCK :][: scales.numel()] = scales

    def get(self, start: int, like: Tensor) -> Tensor:
        """A copy of the weight that begins at ``start``, in the shape and dtype of ``like``."""
        blocks = -(-like.numel() // BLOCK)
        codes = self._codes[start:][: blocks * BLOCK]
        found = restored(codes, self._scales[start // BLOCK :][:blocks], codes.to(like.dtype))
        return found[: like.numel()].view(like.shape)

    def restore(self, home: Tensor) -> None:
        """All weights, in ``home``."""
        restored(self._codes, self._scales, home)
