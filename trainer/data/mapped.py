"""Numbers for each row of a data set, in files without a name that are mapped into memory.

Of many million rows even a few bytes each are hundreds of megabytes. Pages of a file are taken from a process where
memory is short; pages of its own are not. The space is taken at once, so a full disk is an OSError.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 18  # numbers that are looked at together

Make = Callable[[tuple[int, ...], Any], NDArray[Any]]  # a new array of a shape and a type, as np.empty is


def makes(folder: Path) -> Make:
    """What makes arrays in files, on the disk of ``folder``."""
    return partial(_mapped, folder)


def _mapped(folder: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    if not np.prod(shape):
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "r+", shape=shape)


class Numbers:
    """Whole numbers of 64 bits that are added one by one, and read in their order of size."""

    def __init__(self, make: Make = np.empty) -> None:
        self._make, self._new = make, array("q")
        self._all, self._count = np.empty(0, np.int64), 0  # an array with room for more, which keeps one file open

    def append(self, number: int) -> None:
        """Add one."""
        self._new.append(number)
        if len(self._new) == BLOCK:
            self._flush()

    def _flush(self) -> None:
        stop = self._count + len(self._new)
        if stop > len(self._all):
            larger = self._make((2 * stop,), np.int64)
            larger[: self._count] = self._all[: self._count]
            self._all = larger
        self._all[self._count : stop] = self._new
        self._count, self._new = stop, array("q")

    def sorted(self) -> NDArray[np.int64]:
        """All of them."""
        self._flush()
        numbers = self._all[: self._count]
        numbers.sort()
        return numbers


def blocks(numbers: NDArray[Any], overlap: int = 0) -> Iterator[NDArray[Any]]:
    """All numbers in parts, each with the first ``overlap`` of the next."""
    for start in range(0, len(numbers), BLOCK):
        yield numbers[start : start + BLOCK + overlap]


def twice(numbers: NDArray[np.int64]) -> int:
    """How many of these numbers, which are sorted, are equal to the one before."""
    return sum(int((block[1:] == block[:-1]).sum()) for block in blocks(numbers, 1))


def among(numbers: NDArray[np.int64], others: list[NDArray[np.int64]]) -> int:
    """How many of these numbers are in one of the ``others``, which are sorted."""
    count = 0
    for block in blocks(numbers):
        is_in = np.zeros(len(block), bool)
        for other in filter(len, others):
            is_in |= other[np.minimum(np.searchsorted(other, block), len(other) - 1)] == block
        count += int(is_in.sum())
    return count
