"""Moments in fewer bits: AdamW's two, in bf16 or int8 at rest, in fp32 for their update; and masters in bf16, which are
the weights themselves. Training is not exact then.

A chunk's moments are expanded into scratch memory, updated there by the same rule as ever, and compressed again:

    bf16   the upper half of fp32; so are masters, whatever moments are
    int8   first moment: the square of a whole number, -127 to 127, with its sign, times a step, which each block of
           BLOCK elements has; it is the block's largest size / 127^2, rounded to 10 bits, so that all its multiples
           are exact in fp32. Squares keep what is small beside the largest: an input feature 100 times larger than the
           others makes gradients 100 times larger in every row of a matrix, and so in every block
           second moment: 5 bits of exponent and 3 of mantissa, counted down from the block's largest: 2^-32 of that is
           the least that there is. Without zero: an update divides by its root, and must not meet one that was rounded
           away. A block that is all zero stays so

All round stochastically: up as often as what is rounded is near to the upper neighbour; of a first moment in int8 the
root is rounded so, which adds a quarter of a step at most to the mean. A second moment changes by
1 - beta2 of itself per update, far less than two neighbours differ, and a weight by the learning rate; rounded to the
nearest one they would never change.

The noise is a table that is the same in every run. A chunk's begins at a place in it that is a hash of the parameter's
name, the number of its updates, and the chunk's first element. So no state of a generator has to be saved, and the bits
do not depend on buckets, memory or where a run was resumed.

Invariant. What was expanded is compressed to what it was: numbers that need no rounding are not rounded. For a step
that comes from rounded numbers this takes noise that leaves out both ends (``_MARGIN``): a multiple of it, divided by
it, is next to a whole number. So checkpoints have moments in fp32, and resuming from them changes no bit.

bitsandbytes' 8-bit map is another one, of tens: to quantise takes a search per element, five times the time of all
that is done here (benchmarks/records/2026-11-27_moments_2-core). Squares are as near to fp32 as its map is, and our
second moments nearer (tests/unit/test_moments.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deepstow.strategies.core.layout import Item, Layout
from deepstow.strategies.core.moments import BLOCK, NOISE_STARTS, expanded_elements
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.updating.chunks import Chunk

_BITS = {"bf16": 16, "int8": 20}  # of noise: those that rounding drops
_MARGIN = 1 << 12
_LEAST = 2.0**-80  # of the largest of a block; below it all are zero, moments that no update in fp32 can feel
_LARGEST = 127**2  # in steps
_DROPPED = 14  # the last bits of an fp32 number, which a step does not have


class Moments:
    """The moments of a layout whose ``moments_as`` is not fp32, with the scratch memory for ``chunk`` elements."""

    def __init__(self, layout: Layout, arena: Arena) -> None:
        self.chunk, self._int8 = expanded_elements(layout.moments_as, layout.trained_spans), layout.moments_as == "int8"
        region = arena.of("", Item.EXPANDED, torch.float32)
        assert region is not None
        self._expanded = region[: layout.moments * self.chunk].view(layout.moments, self.chunk)
        end = (layout.moments + 1) * self.chunk + NOISE_STARTS
        self._noise, masters = region[layout.moments * self.chunk : end].view(torch.int32), region[end:]
        bits, margin = _BITS[layout.moments_as], _MARGIN * self._int8
        self._noise.random_(margin, (1 << bits) - margin, generator=torch.Generator().manual_seed(0))
        self._masters = masters[: self.chunk] if len(masters) else None
        self._masters_noise = masters[self.chunk :].view(torch.int32)
        self._masters_noise.random_(0, 1 << 16, generator=torch.Generator().manual_seed(1))

    def expand(self, bucket: BucketState, call: Sequence[Chunk]) -> list[list[Tensor]]:
        """The moments of ``call``'s chunks in fp32, by moment and chunk, in scratch memory."""
        sizes = [chunk.stop - chunk.start for chunk in call]
        found = [list(flat[: sum(sizes)].split(sizes)) for flat in self._expanded]
        for number, views in enumerate(found):
            for chunk, view in zip(call, views, strict=True):
                codes = bucket.moments[number][chunk.start : chunk.stop]
                if not self._int8:
                    view.copy_(codes)
                    continue
                for at, part, scales in self._blocks(bucket, number, chunk, view):
                    rows = codes[at : at + part.numel()].view(part.shape)
                    if number:
                        _expand_second(rows, scales, part)
                    else:
                        _expand_first(rows, scales, part, self._spare(part))
        return found

    def _spare(self, part: Tensor) -> Tensor:
        """Memory of the second moments for as many numbers as ``part`` of the first ones, while they are not in it."""
        return self._expanded[1, : part.numel()].view(part.shape)

    def compress(
        self,
        bucket: BucketState,
        call: Sequence[Chunk],
        moments: Sequence[Sequence[Tensor]],
        counts: Sequence[Tensor | int],
    ) -> None:
        """Take in what ``expand`` gave and an update has changed, of which ``counts`` are the numbers. Spoils it."""
        for chunk, count, *views in zip(call, counts, *moments, strict=True):
            starts = self._starts(bucket, chunk, int(count), len(bucket.moments))
            for number, (start, view) in reversed(list(enumerate(zip(starts, views, strict=True)))):
                codes, noise = bucket.moments[number][chunk.start : chunk.stop], self._noise[start:]
                if not self._int8:
                    _upper_half(view, noise[: view.numel()], codes)
                    continue
                for at, part, scales in self._blocks(bucket, number, chunk, view):
                    rows, some = (flat[at : at + part.numel()].view(part.shape) for flat in (codes, noise))
                    if number:
                        _compress_second(part, some, rows, scales)
                    else:
                        _compress_first(part, some, rows, scales, self._spare(part))

    def expand_masters(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """The masters of a call's chunks, which are in bf16, in fp32, in scratch memory."""
        assert self._masters is not None
        sizes = [master.numel() for master in masters]
        found = list(self._masters[: sum(sizes)].split(sizes))
        torch._foreach_copy_(found, list(masters))
        return found

    def round_masters(
        self,
        bucket: BucketState,
        call: Sequence[Chunk],
        updated: Sequence[Tensor],
        masters: Sequence[Tensor],
        counts: Sequence[Tensor],
    ) -> None:
        """Round what ``expand_masters`` gave and an update has changed into ``masters``. Spoils it."""
        for chunk, view, master, count in zip(call, updated, masters, counts, strict=True):
            start = self._starts(bucket, chunk, int(count), 1, "master ")[0]
            _upper_half(view, self._masters_noise[start : start + view.numel()], master)

    @contextmanager
    def held(self, bucket: BucketState, chunk: Chunk, *, writes: bool = False) -> Iterator[None]:
        """The moments of one chunk are in ``places``; with ``writes``, what is written there is kept."""
        moments = self.expand(bucket, [chunk])
        yield
        if writes:
            self.compress(bucket, [chunk], moments, [0])

    def places(self, chunk: Chunk) -> list[Tensor]:
        """Where ``held`` has the moments of ``chunk``."""
        return list(self._expanded[:, : chunk.stop - chunk.start])

    def _starts(self, bucket: BucketState, chunk: Chunk, count: int, number: int, of: str = "") -> list[int]:
        """Where in the noise that of each moment begins, or of what else there is."""
        name, offset = bucket.spec.params[chunk.index], bucket.spec.offsets[chunk.index]
        text = f"{of}{name} {count} {chunk.start - offset}".encode()
        drawn = hashlib.blake2b(text, digest_size=2 * number).digest()
        return [int.from_bytes(drawn[at : at + 2], "little") for at in range(0, len(drawn), 2)]

    def _blocks(
        self, bucket: BucketState, number: int, chunk: Chunk, flat: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """``flat`` in rows of one block each, and the rest of a last block: first element, rows, a scale per row."""
        first = bucket.first_blocks[chunk.index] + (chunk.start - bucket.spec.offsets[chunk.index]) // BLOCK
        whole = flat.numel() // BLOCK
        end, scales = whole * BLOCK, bucket.scales[number][first:].unsqueeze(1)
        if whole:
            yield 0, flat[:end].view(whole, BLOCK), scales[:whole]
        if end < flat.numel():
            yield end, flat[end:].view(1, -1), scales[whole : whole + 1]


def _upper_half(values: Tensor, noise: Tensor, into: Tensor) -> None:
    """Round fp32 to bf16. Spoils ``values``."""
    into.view(torch.int16).copy_(values.view(torch.int32).add_(noise).bitwise_right_shift_(16))


def _expand_first(codes: Tensor, steps: Tensor, into: Tensor, spare: Tensor) -> None:
    into.copy_(codes)
    into.mul_(torch.abs(into, out=spare)).mul_(steps)


def _compress_first(values: Tensor, noise: Tensor, codes: Tensor, steps: Tensor, spare: Tensor) -> None:
    largest = torch.abs(values, out=spare).amax(1, keepdim=True)
    steps.copy_(largest / _LARGEST)
    steps.view(torch.int32).add_(1 << (_DROPPED - 1)).bitwise_right_shift_(_DROPPED).bitwise_left_shift_(_DROPPED)
    # The root with 20 bits behind the point.
    spare.mul_(torch.where(largest > _LEAST, _LARGEST * 2.0**40 / largest, 0.0)).sqrt_()
    torch.copysign(spare, values, out=values)
    whole = values.view(torch.int32).copy_(values)
    codes.copy_(whole.add_(noise).bitwise_right_shift_(20))


def _expand_second(codes: Tensor, lowest: Tensor, into: Tensor) -> None:
    into.view(torch.int32).copy_(codes.view(torch.uint8)).add_(lowest.view(torch.int32)).bitwise_left_shift_(20)


def _compress_second(values: Tensor, noise: Tensor, codes: Tensor, lowest: Tensor) -> None:
    whole = values.view(torch.int32).add_(noise).bitwise_right_shift_(20)
    base = lowest.view(torch.int32).copy_(whole.amax(1, keepdim=True)).sub_(255).clamp_(min=0)
    codes.view(torch.uint8).copy_(whole.sub_(base).clamp_(min=0))
