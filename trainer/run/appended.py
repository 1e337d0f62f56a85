"""A file to which a run appends what it reports. A disk that does not take it ends no run.

What cannot be written waits in memory, and comes with the next: the disk had no room, was read-only or not there for a
while. That is one line, the first time.

Invariant. What was written is whole: bytes of a write that failed are cut off, before the next one at the latest. If
the folder has gone, or another is in its place, since its disk was unmounted, nothing is written there.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.errors import write_line


class Mounted:
    """A folder whose disk is mounted. ``refuse_other`` raises OSError if it has gone, or another is in its place, as
    where the disk was unmounted: what is written there would be found by nobody.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._inode = path, path.stat().st_ino

    def refuse_other(self) -> None:
        if self._path.stat().st_ino != self._inode:
            raise FileNotFoundError(errno.ENOENT, "another folder is in its place", str(self._path))


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
                self._mounted = Mounted(self.path.parent)
                replace_file(self.path, self._waiting)
                self._size = len(self._waiting)
            elif self._waiting:
                self._append()
            self._waiting = b""
        except OSError as error:
            if not self._said:
                self._said = True
                write_line(f"{self.path}: {error.strerror}; training goes on, and {self._what} wait")

    def end(self) -> None:
        """Training is over: write what waits, or say that it is not written."""
        self.flush()
        if self._waiting:
            write_line(f"{self.path}: still cannot be written; {self._what} that wait are lost if it stays so")

    def _append(self) -> None:
        self._mounted.refuse_other()
        unwritten = memoryview(self._waiting)
        with self.path.open("ab", buffering=0) as file:
            self._size = min(self._size or 0, file.tell())  # somebody may have cut it
            file.truncate(self._size)
            try:
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(self._size)  # half a record; if not now, before the next one
                raise
        self._size += len(self._waiting)
