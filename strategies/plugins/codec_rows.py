"""Numbers in 8 or 4 bits, as bytes: by blocks, or in two segments.

Blocks of ``BLOCK`` numbers have a scale in fp32 each, their largest number over the largest level, 2^(b-1) - 1; no
number is off by more than half of it. Segments are of a whole message with the largest number m: half of the 2^b levels
are in |x| <= p, a quarter in the tail on each side, and the error is about

    [p^2 Pr(|x| <= p) + (m - p)^2 Pr(|x| > p)] / (12 * 2^(2 (b - 2)))

of which a histogram of the message has the least; m and p travel with it. On bell-shaped numbers segments are nearer
than uniform levels over the message, and blocks nearer than segments. What is not finite makes its block or message so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK, BINS = 128, 128


@dataclass(frozen=True, slots=True)
class Codec:
    """How numbers become bytes; ``segmented``: in segments, else by blocks."""

    bits: int  # 8 or 4
    segmented: bool

    def encoded(self, numbers: Tensor) -> Tensor:
        """Bytes of messages: (messages, blocks, BLOCK) in fp32 become (messages, bytes)."""
        head, levels = (_in_segments if self.segmented else _in_blocks)(numbers, self.bits)
        if self.bits == 4:
            levels = levels[..., ::2] | levels[..., 1::2] << 4
        return torch.cat([head.contiguous().view(torch.uint8).flatten(1), levels.flatten(1)], 1)

    def decoded(self, coded: Tensor) -> Tensor:
        """The numbers, in fp32: the same bits wherever the bytes are the same."""
        of_block = BLOCK * self.bits // 8
        size = 8 if self.segmented else coded.shape[1] // (of_block + 4) * 4
        head, levels = coded[:, :size].contiguous().view(torch.float32), coded[:, size:]
        if self.bits == 4:
            levels = torch.stack([levels & 15, levels >> 4], -1)
        numbers = levels.reshape(len(coded), -1, BLOCK).float()
        if not self.segmented:
            return (numbers - _most(self.bits)) * head[..., None]
        most, inner, half, centre, tail = _steps(head, self.bits)
        beyond = numbers - half
        negative = beyond >= half // 2
        far = inner + (beyond - half // 2 * negative + 0.5) * tail
        near = -inner + (numbers + 0.5) * centre
        return torch.where(beyond < 0, near, torch.where(negative, -far, far)) + 0 * most


def _most(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def _in_blocks(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    scale = numbers.abs().amax(-1, keepdim=True) / _most(bits)
    levels = (numbers / scale.where(scale != 0, 1)).round() + _most(bits)
    return scale, levels.to(torch.uint8)


def _steps(head: Tensor, bits: int) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    """The largest number, where the centre ends, its levels, and the steps between levels in it and in the tails."""
    most, inner = head[:, 0, None, None], head[:, 1, None, None]
    half = int(2 ** (bits - 1))
    return most, inner, half, 2 * inner / half, (most - inner) / (half // 2)


def _in_segments(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    sizes = numbers.abs()
    most = sizes.flatten(1).amax(1, keepdim=True)
    head = torch.cat([most, most * _centre(sizes.flatten(1), most)], 1)
    _, inner, half, centre, tail = _steps(head, bits)
    near = ((numbers + inner) / centre.where(centre != 0, 1)).floor().clamp(0, half - 1)
    far = ((sizes - inner) / tail.where(tail != 0, 1)).floor().clamp(0, half // 2 - 1) + half
    levels = torch.where(sizes <= inner, near, far + half // 2 * (numbers < 0))
    return head, levels.to(torch.uint8)


def _centre(sizes: Tensor, most: Tensor) -> Tensor:
    """Of each message p/m with the least error, by a histogram."""
    places = (sizes / most.where(most != 0, 1) * BINS).nan_to_num(0, 0, 0).ceil().long().clamp(1, BINS)
    counts = places.new_zeros(len(sizes), BINS + 1).scatter_add_(1, places, torch.ones_like(places))
    within = counts.cumsum(1) / sizes.shape[1]
    parts = torch.arange(BINS + 1, device=sizes.device) / BINS
    return (parts**2 * within + (1 - parts) ** 2 * (1 - within)).argmin(1, keepdim=True) / BINS
