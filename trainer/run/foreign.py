"""Files that somebody else may have written, whatever they hold: opened without waiting, and read up to a size."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from deepstow.strategies.state import sealed

LONGEST_LINE = 1 << 20  # characters; a longer one is several
LARGEST = 256 << 20  # bytes of a file that is read as a whole


def opened(path: Path) -> BufferedReader:
    """The file at ``path``. Raise OSError if it cannot be read, or is none: a pipe would be waited for, a device has no
    end.
    """
    return BufferedReader(sealed.opened(path))


def text_of(path: Path) -> str:
    """Its text; what is not UTF-8 is replaced. Raise OSError, also for a file that is larger than LARGEST."""
    with opened(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, f"more than {LARGEST >> 20} MiB", str(path))
    return content.decode("utf-8", errors="replace")


def lines_of(path: Path) -> Iterator[str]:
    """Its lines, one after the other, or parts of lines that are too long for anything. Raise OSError."""
    with opened(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line.decode("utf-8", errors="replace")
