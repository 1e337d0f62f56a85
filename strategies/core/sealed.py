"""A folder whose manifest says what every file in it is: written last, and checked before anything is read from it.

A disk returns a flipped bit, a copy ends early, a file of another save has the right name, and neither safetensors nor
Arrow nor JSON notices all of it.

``seal`` waits until all that is in it is on the disk, hashes the files while the disk works, and writes
``manifest.json`` as the last file: size and SHA-256 by name, what the writer says about the whole, and a hash of its
own. ``read`` opens the manifest alone, ``damage`` compares every byte.

Invariant. A folder with a readable manifest had all its bytes on the disk before. ``damage`` names a file that was
changed, cut, exchanged, removed or added.

Refused: symbolic links inside a folder, and names that would lead out of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from strategies.core.commit import replace_file, sync

MANIFEST = "manifest.json"
FORMAT = 1
WAITING = 4  # threads beyond the cores: those that wait for the disk do not compute


class Damaged(ValueError):
    """A folder is not what was written; the message is one line without the folder's name."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A manifest: what the writer said (``kind``, ``about``), and size and SHA-256 of each file by relative name."""

    kind: str
    about: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]


def seal(folder: Path, kind: str, about: Mapping[str, Any]) -> Sealed:
    """Sync and hash everything in ``folder``, then write its manifest. Raise OSError if anything is a link."""
    paths = [path for path in _files(folder) if path.name != MANIFEST or path.parent != folder]
    by_size = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    with _threads() as pool:
        synced = [pool.submit(sync, path) for path in by_size]
        sizes = dict(zip(by_size, pool.map(size_and_hash, by_size), strict=True))
        for waiting in synced:
            waiting.result()
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync(inner)
    files = {_name(folder, path): sizes[path] for path in sorted(paths)}
    content = {
        "format": FORMAT,
        "kind": kind,
        "about": dict(about),
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()},
    }
    replace_file(folder / MANIFEST, signed(content))  # syncs the folder as well
    return Sealed(kind, json.loads(json.dumps(about)), files)


def read(folder: Path, kind: str) -> Sealed:
    """What the manifest of ``folder`` says. Raise Damaged if it is not what ``seal`` has written for this ``kind``."""
    try:
        with _opened(folder / MANIFEST) as file:
            content = content_of(file.read())
    except FileNotFoundError:
        raise Damaged(f"there is no {MANIFEST} in it") from None
    except OSError:
        raise Damaged(f"{MANIFEST} cannot be read") from None
    except Damaged as error:
        raise Damaged(f"{MANIFEST} {error}") from None
    try:
        if content["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} has format {content['format']}, this release reads {FORMAT}")
        files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in content["files"].items()}
        sealed = Sealed(str(content["kind"]), dict(content["about"]), files)
    except Damaged:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise Damaged(f"{MANIFEST} is damaged, something is missing in it") from None
    if sealed.kind != kind:
        raise Damaged(f"{MANIFEST} is of the kind {sealed.kind}, not {kind}")
    return sealed


def damage(folder: Path, sealed: Sealed) -> list[str]:
    """One line, without the folder's name, for every file that is not what was sealed. Reads every byte."""
    lines = [f"{name!r}: not a name inside the folder" for name in sealed.files if not _is_inside(name)]
    if lines:
        return lines
    expected = {name: folder / name for name in sealed.files}
    try:
        there = {_name(folder, path) for path in _files(folder)} - {MANIFEST}
    except OSError as error:
        return [str(error)]
    lines += [f"{name}: not in the manifest" for name in sorted(there - expected.keys())]
    with _threads() as pool:
        found = dict(zip(expected, pool.map(_found, expected.values()), strict=True))
    for name, (size, digest) in sealed.files.items():
        if isinstance(it := found[name], str):
            lines.append(f"{name}: {it}")
        elif it[0] != size:
            lines.append(f"{name}: {it[0]} bytes, {size} were written")
        elif it[1] != digest:
            lines.append(f"{name}: damaged, its hash is another")
    return lines


def _found(path: Path) -> tuple[int, str] | str:
    try:
        return size_and_hash(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def size_and_hash(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    with _opened(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _opened(path: Path) -> FileIO:
    """A file, open for reading. A pipe or a device in its place is an OSError; it would be waited for."""
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file")
    return file


def _files(folder: Path) -> Iterator[Path]:
    """Every file in ``folder`` and the folders in it. Raise OSError if one is a symbolic link."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise OSError(f"{_name(folder, path)}: a symbolic link; only files are written and read here")
        if not path.is_dir():
            yield path


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)) + WAITING, "seal")


def signed(content: Any) -> str:
    """``content`` as JSON together with a hash of its own; for ``content_of``."""
    return json.dumps({"sha256": digest_of(content), "content": content}, indent=1, allow_nan=False)


def content_of(text: bytes) -> Any:
    """What ``signed`` was given. Raise Damaged if it cannot be read, or is not what was written."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("cannot be read") from None
    try:
        content, known = found["content"], found["sha256"]
    except (KeyError, TypeError):
        raise Damaged("is damaged, something is missing in it") from None
    if known != digest_of(content):
        raise Damaged("is damaged, its hash is another")
    return content


def digest_of(content: Any) -> str:
    """SHA-256 of what JSON can hold; the order of keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
