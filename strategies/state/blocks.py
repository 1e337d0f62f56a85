"""Blocks of a matrix: rows of some of its columns, as a rank has them where a weight is divided along its columns.

A range of a matrix with few columns, counted row by row, is at most three rectangles of the whole matrix: the rest of a
row, whole rows, the beginning of a row. Any two divisions of a matrix can be compared and copied by their rectangles.

Tensors of other than two dimensions are matrices of their last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Rows ``top`` to ``bottom`` of columns ``left`` to ``right``; its first element is element ``offset`` of a memory
    in which rows are ``stride`` elements apart.
    """

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


def all_columns(of: int) -> Columns:
    """Of a matrix that has ``of``."""
    return Columns(0, of, of)


def gaps(found: Sequence[Rectangle], rows: int, of: int) -> Iterator[str]:
    """Why rectangles do not cover a matrix once, one line each."""
    ordered = sorted(found)
    for place, one in enumerate(ordered):
        if one.bottom > rows or one.right > of:
            yield f"rows {one.top} to {one.bottom} of columns {one.left} to {one.right} are outside of {rows} x {of}"
        for other in ordered[place + 1 :]:
            if other.top >= one.bottom:
                break
            if one.common(other) is not None:
                bottom, column = min(one.bottom, other.bottom), max(one.left, other.left)
                yield f"rows {other.top} to {bottom} of column {column} are there twice"
    missing = rows * of - sum(each.area for each in found)
    if missing > 0:
        yield f"{missing} of {rows * of} elements are in no file"
