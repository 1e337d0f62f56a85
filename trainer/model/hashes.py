"""SHA-256 of files, each read once on this machine: those of large files are kept in ``~/.cache/deepstow/hashes``.

What is kept counts as long as the file has the same path, inode, size, time of modification and time of change, both
in nanoseconds. No program sets the time of change, so a file whose bytes were exchanged is read again, also if its
size and its time of modification were brought back. Nothing is kept of a file that had changed less than ``SETTLED_S``
before it was read: a change while it is read may leave it the same times.

Believed is the file system, which has to give a file that is written another time of change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from deepstow.strategies.core.cgroups import usable_cores
from deepstow.strategies.state.commit import replace_file
from deepstow.strategies.state.sealed import WAITING, Damaged, digest_of, read_signed, signed, size_and_hash

LARGE = 16 << 20  # bytes; to hash fewer takes no longer than to look for what is kept
SETTLED_S = 2.0


class _Kept(BaseModel):
    file: list[int]
    sha256: str


def hashes(paths: Iterable[Path]) -> list[str]:
    """The SHA-256 of each file, in their order; several are read at a time. May raise OSError."""
    with ThreadPoolExecutor(usable_cores() + WAITING, "hash") as pool:
        return list(pool.map(_hash, paths))


def _hash(path: Path) -> str:
    now_ns, stamped = time.time_ns(), stamp(path)
    if stamped[1] < LARGE:
        return size_and_hash(path)[1]
    place = Path.home() / f".cache/deepstow/hashes/{digest_of(str(path.absolute()))[:32]}.json"
    with suppress(OSError, Damaged):
        record = read_signed(place, _Kept)
        if record.file == stamped:
            return record.sha256
    sha256 = size_and_hash(path)[1]
    if now_ns - max(stamped[2:]) > SETTLED_S * 1e9:
        with suppress(OSError):  # it is read again the next time
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, signed(_Kept(file=stamped, sha256=sha256).model_dump()))
    return sha256


def stamp(path: Path) -> list[int]:
    """What of a file differs once its bytes were exchanged: inode, size, and both times. May raise OSError."""
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def stamps(folder: Path) -> dict[str, list[int]]:
    """The ``stamp`` of each file below ``folder``, by its path there; of a folder that is not there none."""
    return {str(path.relative_to(folder)): stamp(path) for path in folder.rglob("*") if path.is_file()}


def changed(before: Mapping[str, list[int]], folder: Path) -> list[str]:
    """Files below ``folder`` that are other ones than in ``before``, its stamps then: new, gone, or written."""
    now = stamps(folder)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
