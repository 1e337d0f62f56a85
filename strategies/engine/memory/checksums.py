"""Whether a drive gives back what was written: checksums in memory, which is not the drive that they check.

A place is written as a whole for the first time. It has one checksum for each CHUNK of its bytes, so that a part of it
can be compared, and written anew, by the chunks that it touches. All bytes that were written count, padding included.
They are 8 bytes per MiB of the file, and XXH3's, which keeps no other thread out: 38 GB/s of a core (docs/disk.md has
what that is of a drive's time). 64 bits find faults of drives, not forgeries.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import xxhash
from torch import Tensor

CHUNK = 1 << 20


class Checksums:
    """Of the places of one file, each known by its offset. Threads may use different places at the same time."""

    def __init__(self) -> None:
        self._of: dict[int, array[int]] = {}

    def note(self, memory: Tensor, offset: int, part: range | None = None) -> None:
        """``memory``, bytes, is written to the place at ``offset``; ``part``: only these of its bytes have changed."""
        if part is None:
            self._of[offset] = array("Q", bytes(8 * -(-memory.numel() // CHUNK)))
        for number, checksum in _sums(memory, part):
            self._of[offset][number] = checksum

    def first_difference(self, memory: Tensor, offset: int, part: range | None = None) -> int | None:
        """The first byte of the chunk in which ``memory``, read from the place, is not what was written; None: it is.
        What was never written is nobody's to read, zeros as well.
        """
        if (sums := self._of.get(offset)) is None:
            return 0
        return next((number * CHUNK for number, checksum in _sums(memory, part) if checksum != sums[number]), None)


def _sums(memory: Tensor, part: range | None) -> Iterator[tuple[int, int]]:
    """The checksum of each chunk that has bytes of ``part``, by its number."""
    data: Any = memory.numpy()
    view, bytes_of_it = memoryview(data), range(memory.numel()) if part is None else part
    for number in range(bytes_of_it.start // CHUNK, -(-bytes_of_it.stop // CHUNK)):
        hasher = xxhash.xxh3_64()
        hasher.update(view[number * CHUNK : (number + 1) * CHUNK])  # of all its releases this lets other threads run
        yield number, hasher.intdigest()
