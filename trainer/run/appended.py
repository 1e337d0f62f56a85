"""A file to which a run appends what it reports. A disk that does not take it ends no run.

What cannot be written waits in memory, and comes with the next: the disk had no room, was read-only or not there for a
while. That is one line, the first time.

Invariant. What was written is whole: bytes of a write that failed are cut off, before the next one at the latest. A
folder that goes meanwhile is not made again, for it may be where a disk was mounted.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from strategies.core.commit import replace_file
from trainer.errors import write_line


class Appended:
    """The file at ``path``; ``what`` waits is said in the line. It begins empty, or with what ``begin`` is given."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._size: int | None = None  # of the file, as far as it is whole; None: it is not begun
        self._waiting = b""
        self._said = False

    def begin(self, content: bytes = b"") -> None:
        """Make ``content`` all that the file has."""
        self._size, self._waiting = None, content
        self.flush()

    def add(self, content: bytes) -> None:
        """Append it with the next ``flush``."""
        self._waiting += content

    def flush(self) -> None:
        """Write what waits, if that is possible."""
        try:
            if self._size is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, self._waiting)
                self._size = len(self._waiting)
            elif self._waiting:
                self._append()
            self._waiting = b""
        except OSError as error:
            if not self._said:
                self._said = True
                write_line(f"{self.path}: {error.strerror}; training goes on, and {self._what} wait")

    def _append(self) -> None:
        left = memoryview(self._waiting)
        with self.path.open("ab", buffering=0) as file:
            self._size = min(self._size or 0, file.tell())  # somebody may have cut it
            file.truncate(self._size)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(self._size)  # half a record; if not now, before the next one
                raise
        self._size += len(self._waiting)
