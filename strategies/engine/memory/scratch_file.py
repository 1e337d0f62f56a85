"""A file for what memory has no room for, which lives as long as this process and leaves nothing behind.

It has no name (``TemporaryFile`` makes it so, or takes the name away at once): whatever ends the process, a kill among
it, gives the space back, and no two runs can share it. It is scratch, never a checkpoint. All of its space is reserved
when it is made, so that a disk that others fill cannot end a run. ``O_DIRECT`` goes past the page cache, which would
take the very memory that the file saves.

No drive is believed: of all that is written there is a checksum in memory (``Checksums``), and what is read is
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
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import torch
import xxhash
from torch import Tensor

from deepstow.strategies.core.sizes import human

CHUNK = 1 << 20


class Checksums:
    """Checksums, in memory, of the places of one file, each known by its offset. Threads may use different places at
    the same time.

    A place is written as a whole for the first time. It has one checksum for each CHUNK of its bytes, so that a part of
    it can be compared, and written anew, by the chunks that it touches. All bytes that were written count, padding
    included. They are 8 bytes per MiB of the file, and XXH3's, which keeps no other thread out: 38 GB/s of a core
    (docs/disk.md has what that is of a drive's time). 64 bits find faults of drives, not forgeries.
    """

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


MOST_BYTES = 64 << 20  # of one call; the system takes less than 2 GiB
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
ON_NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "gluster", "afs", "9p", "fuse", "virtiofs")
STATE = "optimizer state"
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class DiskError(RuntimeError):
    """Reading or writing the file failed, or it has not what was written; what rests in it is lost."""


class Store:
    """``num_bytes`` of ``what`` at ``place``, reserved. Raise ValueError, in one line, if it cannot be. It is divided
    into parts, each of which is read and written as a whole. ``checked``: whether what is read is compared with what
    was written. A kind of store says how bytes are moved (``get``, ``put``) and let go (``close``).
    """

    def __init__(self, place: str | Path, num_bytes: int, what: str = STATE, *, checked: bool = True) -> None:
        self._place = str(place)
        self._num_bytes = num_bytes
        self._what = what
        self._sums = Checksums() if checked else None
        if complaint := self.unsuitable(self._place):
            raise ValueError(complaint)

    @staticmethod
    def unsuitable(place: str) -> str:
        """Why ``place`` cannot have a store; empty if nothing is known against it. Nothing is made there."""
        raise NotImplementedError

    def get(self, memory: Tensor, offset: int) -> None:
        """Fill ``memory``, bytes that begin and end at pages, with what was put at ``offset``. Any OSError ends it."""
        raise NotImplementedError

    def put(self, memory: Tensor, offset: int) -> None:
        """Keep what ``memory`` has, as the bytes at ``offset``."""
        raise NotImplementedError

    def close(self) -> None:
        """What was kept is not needed any more."""
        raise NotImplementedError

    def read(self, memory: Tensor, offset: int) -> None:
        """``get``, and compare. Raise DiskError: it failed, or another content came."""
        try:
            self.get(memory, offset)
        except OSError as error:
            raise self._lost(memory, "read", error.strerror or str(error)) from error
        self._compare(memory, offset)

    def write(self, memory: Tensor, offset: int) -> None:
        """``put``, and note what it was. Raise DiskError: it failed."""
        try:
            self.put(memory, offset)
        except OSError as error:
            raise self._lost(memory, "written", error.strerror or str(error)) from error
        if self._sums is not None:
            self._sums.note(memory, offset)

    def _compare(self, memory: Tensor, offset: int, part: range | None = None) -> None:
        differs = None if self._sums is None else self._sums.first_difference(memory, offset, part)
        if differs is not None:
            where = f"at byte {offset + differs} of the file the drive has not what was written"
            raise self._lost(memory, "read", where)

    def _lost(self, memory: Tensor, done: str, why: str | None) -> DiskError:
        problem = f"{human(memory.nbytes)} of {self._what} could not be {done}"
        return DiskError(f"the disk tier in {self._place}: {problem}: {why}")


class ScratchFile(Store):
    """A file in a folder, which can be mapped."""

    def __init__(self, place: str | Path, num_bytes: int, what: str = STATE, *, checked: bool = True) -> None:
        super().__init__(place, num_bytes, what, checked=checked)
        self._folder = Path(self._place)
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

    @staticmethod
    def unsuitable(place: str) -> str:
        return _unsuitable(Path(place))

    def get(self, memory: Tensor, offset: int) -> None:
        self._move(os.preadv, memory, offset)
        self._refuse_lost(memory)  # after the read: a write beyond what is gone makes it read as zeros

    def put(self, memory: Tensor, offset: int) -> None:
        self._move(os.pwritev, memory, offset)

    def _refuse_lost(self, memory: Tensor) -> None:
        if self._blocks() < self._reserved:
            raise self._lost(memory, "read", "some of the file's space was taken away")

    def _move(self, call: Callable[[int, Sequence[memoryview], int], int], memory: Tensor, offset: int) -> None:
        data: Any = memory.numpy()
        remaining = memoryview(data)
        while remaining:
            count = call(self._handle, [remaining[:MOST_BYTES]], offset)
            if not count:
                raise OSError(errno.EIO, "nothing more came")
            remaining, offset = remaining[count:], offset + count

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


def _unsuitable(folder: Path) -> str:
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
    resolved = folder.resolve()
    mounted = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    return max(mounted, key=lambda each: len(Path(each.mountpoint).parts)).fstype if mounted else ""


def _why(error: OSError, folder: Path, num_bytes: int, what: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = human(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize)
        return f"{human(num_bytes)} of {what} are to be there, and {free} are free ({error.strerror})"
    if error.errno in NO_DIRECT:
        return f"its file system ({file_system(folder)}) has no O_DIRECT; name a folder on a local disk"
    return f"{human(num_bytes)} cannot be reserved there: {error.strerror}"
