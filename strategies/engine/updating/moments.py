"""Moments that rest in fewer bits than fp32, and masters in bf16, which are the weights themselves: they are decoded
into scratch memory for their update, and encoded again (``engine/codecs.py``). Training is not exact then.

The noise of rounding is a table that is the same in every run. A chunk's begins at a place in it that is a hash of the
parameter's name, the number of its updates, and the chunk's first element. So no state of a generator has to be saved,
and the bits do not depend on buckets, memory or where a run was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deepstow.strategies.core.formats import FORMATS, NOISE_STARTS, expanded_elements
from deepstow.strategies.core.layout import Item, Layout
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.codecs import MASTERS, STATE
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.pieces import Chunk


class Moments:
    """The moments of a layout whose ``moments_as`` is not fp32, with the scratch memory for ``chunk`` elements."""

    def __init__(self, layout: Layout, arena: Arena) -> None:
        self.chunk = expanded_elements(layout.moments_as, layout.trained_spans)
        self._format = FORMATS[layout.moments_as]
        self._codec = STATE[layout.moments_as]
        region = arena.of("", Item.EXPANDED, torch.float32)
        assert region is not None
        self._expanded = region[: layout.moments * self.chunk].view(layout.moments, self.chunk)
        end = (layout.moments + 1) * self.chunk + NOISE_STARTS
        self._noise, masters = region[layout.moments * self.chunk : end].view(torch.int32), region[end:]
        bits, margin = self._codec.noise_bits, self._codec.margin
        self._noise.random_(margin, (1 << bits) - margin, generator=torch.Generator().manual_seed(0))
        self._masters = masters[: self.chunk] if len(masters) else None
        self._masters_noise = masters[self.chunk :].view(torch.int32)
        self._masters_noise.random_(0, 1 << 16, generator=torch.Generator().manual_seed(1))

    def expand(self, bucket: BucketState, call: Sequence[Chunk]) -> list[list[Tensor]]:
        """The moments of ``call``'s chunks in fp32, by moment and chunk, in scratch memory."""
        sizes = [chunk.stop - chunk.start for chunk in call]
        expanded = [list(flat[: sum(sizes)].split(sizes)) for flat in self._expanded]
        for number, views in enumerate(expanded):
            for chunk, view in zip(call, views, strict=True):
                for rows, codes, scales in self._rows(bucket, number, chunk, view):
                    self._codec.moments[number].decode(codes, scales, rows, self._spare(number, rows))
        return expanded

    def _spare(self, number: int, part: Tensor) -> Tensor | None:
        """Memory of the second moments for as many numbers as ``part`` of the first ones, while they are not in it."""
        return None if number else self._expanded[1, : part.numel()].view(part.shape)

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
                for rows, codes, scales in self._rows(bucket, number, chunk, view):
                    noise = self._noise[start : start + rows.numel()].view(rows.shape)
                    self._codec.moments[number].encode(rows, noise, codes, scales, self._spare(number, rows))
                    start += rows.numel()

    def expand_masters(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """The masters of a call's chunks, which are in bf16, in fp32, in scratch memory."""
        assert self._masters is not None
        sizes = [master.numel() for master in masters]
        expanded = list(self._masters[: sum(sizes)].split(sizes))
        torch._foreach_copy_(expanded, list(masters))
        return expanded

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
            noise = self._masters_noise[start : start + view.numel()]
            MASTERS.encode(view, noise, master.view(torch.uint8), master, None)

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

    def _rows(
        self, bucket: BucketState, number: int, chunk: Chunk, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """``flat``, the numbers of ``chunk``, in rows of one block, then what is left of a last block: the rows, their
        codes as bytes, and their scales. One row, and no scales, of a format without blocks.
        """
        resting = self._format
        codes = bucket.moments[number][resting.code_bytes(chunk.start) : resting.code_bytes(chunk.stop)]
        if not resting.block:
            yield flat.view(1, -1), codes.view(1, -1), flat[:0]
            return
        full_rows = flat.numel() // resting.block
        first = bucket.first_blocks[chunk.index] + (chunk.start - bucket.spec.offsets[chunk.index]) // resting.block
        scales = bucket.scales[number][first:].unsqueeze(1)
        end, coded = full_rows * resting.block, resting.code_bytes(full_rows * resting.block)
        if full_rows:
            yield flat[:end].view(full_rows, -1), codes[:coded].view(full_rows, -1), scales[:full_rows]
        if end < flat.numel():
            yield flat[end:].view(1, -1), codes[coded:].view(1, -1), scales[full_rows : full_rows + 1]
