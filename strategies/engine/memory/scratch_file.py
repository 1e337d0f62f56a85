"""A file for what memory has no room for, which lives as long as this process and leaves nothing behind.

It has no name (``TemporaryFile`` makes it so, or takes the name away at once): whatever ends the process, a kill among
it, gives the space back, and no two runs can share it. It is scratch, never a checkpoint. All of its space is reserved
when it is made, so that a disk that others fill cannot end a run. ``O_DIRECT`` goes past the page cache, which would
take the very memory that the file saves.

No drive is believed: of all that is written there is a checksum in memory (``checksums.py``), and what is read is
compared before anybody has it. That finds lost and misdirected writes as well, which leave an old content.

Refused, each in one line before anything heavy: a folder that is missing, is none, or cannot be written; a file system
in memory (it would save nothing) or on the network (a lost connection would stop training); one without ``O_DIRECT``;
too little space.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import torch
from torch import Tensor

from deepstow.strategies.core.on_disk import part_bytes
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.checksums import Checksums

MOST_BYTES = 64 << 20  # of one call; the system takes less than 2 GiB
MOST_MOVES = 4  # that one drive is given at once, before others wait
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
ON_NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "gluster", "afs", "9p", "fuse", "virtiofs")
STATE = "optimizer state"
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class DiskError(RuntimeError):
    """Reading or writing the file failed, or it has not what was written; what rests in it is lost."""


class ScratchFile:
    """``num_bytes`` of ``what`` in ``folder``, reserved. Raise ValueError, in one line, if it cannot be. It is divided
    into places, each of which is read and written as a whole. ``checked``: whether what is read is compared.
    """

    def __init__(self, folder: str | Path, num_bytes: int, what: str = STATE, *, checked: bool = True) -> None:
        self._folder, self._what, self._num_bytes = Path(folder), what, num_bytes
        self._sums = Checksums() if checked else None
        if said := unsuitable(self._folder):
            raise ValueError(said)
        try:
            self._file: Any = TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  closed by ``close``, or the end
        except OSError as error:
            raise ValueError(f"no file can be made there: {error.strerror}") from None
        try:
            if num_bytes:
                os.posix_fallocate(self._handle, 0, num_bytes)
            flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            self._file.close()
            raise ValueError(_why(error, self._folder, num_bytes, what)) from None
        self._reserved = self._blocks()  # 0 on file systems that promise space without giving it

    def _blocks(self) -> int:
        return os.fstat(self._handle).st_blocks

    @property
    def _handle(self) -> int:
        return int(self._file.fileno())

    def read(self, memory: Tensor, offset: int) -> None:
        """Fill ``memory``, bytes that begin and end at pages, with what was written at ``offset``. Or DiskError."""
        self._move(os.preadv, "read", memory, offset)
        self._refuse_lost(memory)  # after the read: a write beyond what is gone makes it read as zeros
        self._compare(memory, offset)

    def write(self, memory: Tensor, offset: int) -> None:
        self._move(os.pwritev, "written", memory, offset)
        if self._sums is not None:
            self._sums.note(memory, offset)

    def _refuse_lost(self, memory: Tensor) -> None:
        if self._blocks() < self._reserved:
            raise self._lost(memory, "read", "some of the file's space was taken away")

    def _compare(self, memory: Tensor, offset: int, part: range | None = None) -> None:
        differs = None if self._sums is None else self._sums.first_difference(memory, offset, part)
        if differs is not None:
            where = f"at byte {offset + differs} of the file the drive has not what was written"
            raise self._lost(memory, "read", where)

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], done: str, memory: Tensor, offset: int
    ) -> None:
        data: Any = memory.numpy()
        left = memoryview(data)
        while left:
            try:
                count = call(self._handle, [left[:MOST_BYTES]], offset)
                if not count:
                    raise OSError(errno.EIO, "nothing more came")
            except OSError as error:
                raise self._lost(memory, done, error.strerror) from error
            left, offset = left[count:], offset + count

    def _lost(self, memory: Tensor, done: str, why: str | None) -> DiskError:
        what = f"{human(memory.nbytes)} of {self._what} could not be {done}"
        return DiskError(f"the disk tier in {self._folder}: {what}: {why}")

    @cached_property
    def _mapping(self) -> mmap.mmap:
        return mmap.mmap(self._handle, self._num_bytes)

    def mapped(self) -> Tensor:
        """Its bytes, to be read after ``refuse_damaged`` and written before ``keep``. Pages are the system's, and
        memory that is short has none of them. The tensor keeps them when the file is closed.
        """
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def refuse_damaged(self, place: Tensor, offset: int, part: range) -> None:
        """Raise DiskError unless these bytes of ``place``, of ``mapped`` from ``offset`` on, are what was written."""
        self._refuse_lost(place)  # before they are looked at, which would end the process
        self._compare(place, offset, part)

    def keep(self, place: Tensor, offset: int, part: range | None = None) -> None:
        """What was written to ``place``, of ``mapped``, is in the file, and takes no memory any more."""
        if self._sums is not None:
            self._sums.note(place, offset, part)
        try:
            self._mapping.flush()
        except OSError as error:
            raise self._lost(place, "written", error.strerror) from error
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


class StripedFile:
    """A file in each of several folders, each on a drive of its own, as if they were one: what is read and written is
    divided evenly (``part_bytes``), and its parts move at the same time. Raise ValueError like ``ScratchFile``.
    """

    def __init__(
        self, folders: Sequence[str | Path], num_bytes: int, what: str = STATE, *, checked: bool = True
    ) -> None:
        """``num_bytes`` are those of each file; offsets too are those in each."""
        self._threads = ThreadPoolExecutor(MOST_MOVES * len(folders), "stow-drive")
        self._files = list[ScratchFile]()
        for folder in folders:
            try:
                self._files.append(ScratchFile(folder, num_bytes, what, checked=checked))
            except ValueError as error:
                self.close()
                raise ValueError(f"{folder}: {error}" if len(folders) > 1 else str(error)) from None

    def read(self, memory: Tensor, offset: int) -> None:
        self._on_each(ScratchFile.read, memory, offset)

    def write(self, memory: Tensor, offset: int) -> None:
        self._on_each(ScratchFile.write, memory, offset)

    def on(self, drive: int) -> ScratchFile:
        return self._files[drive]

    def _on_each(self, move: Callable[[ScratchFile, Tensor, int], None], memory: Tensor, offset: int) -> None:
        first, *others = zip(self._files, memory.split(part_bytes(memory.nbytes, len(self._files))), strict=False)
        moving = [self._threads.submit(move, *other, offset) for other in others]
        try:
            move(*first, offset)
        finally:
            wait(moving)  # also after an error: nobody else may have the memory before
        for each in moving:
            each.result()

    def close(self) -> None:
        self._threads.shutdown()
        for file in self._files:
            file.close()


def unsuitable(folder: Path) -> str:
    """Why ``folder`` cannot have the file; empty if nothing is known against it."""
    if not folder.is_dir():
        return "not a folder" if folder.exists() else "no such folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written"
    kind = file_system(folder)
    if kind in IN_MEMORY:
        return f"is in memory ({kind}), so it would save none; name a folder on a local disk"
    if kind.startswith(ON_NETWORK):
        return (
            f"is on the network or behind a program ({kind}), which may stop answering; name a folder on a local disk"
        )
    return ""


def file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` is on."""
    there = folder.resolve()
    mounted = [each for each in psutil.disk_partitions(all=True) if there.is_relative_to(each.mountpoint)]
    return max(mounted, key=lambda each: len(Path(each.mountpoint).parts)).fstype if mounted else ""


def _why(error: OSError, folder: Path, num_bytes: int, what: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = human(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize)
        return f"{human(num_bytes)} of {what} are to be there, and {free} are free ({error.strerror})"
    if error.errno in NO_DIRECT:
        return f"its file system ({file_system(folder)}) has no O_DIRECT; name a folder on a local disk"
    return f"{human(num_bytes)} cannot be reserved there: {error.strerror}"
