"""Text tables with aligned columns: the one place that pads cells."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

RULE = 120  # characters, at most, of the line below the names


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = (), *, markdown: bool = False
) -> list[str]:
    """The lines of a table: column names, dashes, then one line per row; columns in ``right`` are right-aligned."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [cell.rjust(width) if name in right else cell.ljust(width)
         for name, cell, width in zip(header, line, widths, strict=True)]
        for line in lines
    ]  # fmt: skip
    if markdown:
        padded.insert(1, ["-" * width for width in widths])
        return [f"| {' | '.join(line)} |" for line in padded]
    text_lines = ["  ".join(line).rstrip() for line in padded]
    return [text_lines[0], "-" * min(RULE, max(map(len, text_lines))), *text_lines[1:]]
