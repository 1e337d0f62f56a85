"""Blocks of a matrix: rows of some of its columns, as a rank has them where a weight is divided along its columns.

A range of some columns, counted row by row, is at most three rectangles of the whole matrix: the rest of a row, whole
rows, the beginning of a row. Any two divisions of a matrix can be compared and copied by their rectangles. A range of a
whole tensor is a rectangle as well, if the tensor is taken for a matrix of one row. Tensors of other than two
dimensions of which ranks have columns are matrices of their last dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Columns(NamedTuple):
    """Columns ``start`` to ``stop`` of a matrix that has ``of``."""

    start: int
    stop: int
    of: int

    @property
    def width(self) -> int:
        return self.stop - self.start


class Rectangle(NamedTuple):
    """Rows ``top`` to ``bottom`` of columns ``left`` to ``right``, in memory from ``offset`` on, ``stride`` apart."""

    top: int
    bottom: int
    left: int
    right: int
    offset: int
    stride: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def common(self, other: Rectangle) -> Rectangle | None:
        """What is in both, in the memory of this one."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        if top >= bottom or left >= right:
            return None
        offset = self.offset + (top - self.top) * self.stride + left - self.left
        return Rectangle(top, bottom, left, right, offset, self.stride)


def ranges(columns: Columns, start: int, count: int) -> Iterator[tuple[int, int]]:
    """``count`` elements of these columns, from ``start`` on, as whole rows and parts of one row: start and count."""
    stop, width = start + count, columns.width
    while start < stop:
        behind = start % width
        size = min(width - behind, stop - start) if behind or stop - start < width else (stop - start) // width * width
        yield start, size
        start += size


def rectangles(columns: Columns, start: int, count: int) -> Iterator[Rectangle]:
    """The rectangles of ``count`` elements of these columns, from ``start`` on; their memory begins at ``start``."""
    width = columns.width
    for first, size in ranges(columns, start, count):
        row, behind = divmod(first, width)
        left = columns.start + behind
        right = left + size if size < width else columns.stop
        yield Rectangle(row, row + max(1, size // width), left, right, first - start, width)
