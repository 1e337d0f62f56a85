"""A folder whose manifest says what every file in it is: written last, and checked before anything is read from it.

A disk returns a flipped bit, a copy ends early, a file of another save has the right name, and neither safetensors nor
Arrow nor JSON notices all of it. ``manifest.json`` has the size and SHA-256 of each file by name, what the writer says
about the whole, and a hash of its own. ``read`` opens the manifest alone, ``damage`` compares every byte.

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
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field, ValidationError

from deepstow.strategies.core.cgroups import usable_cores
from deepstow.strategies.state.commit import inside, replace_file, sync

MANIFEST = "manifest.json"
WAITING = 4  # threads beyond the cores: those that wait for the disk do not compute
Size: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
M = TypeVar("M", bound=BaseModel)


class Damaged(ValueError):
    """A folder is not what was written; the message is one line without the folder's name."""


class File(BaseModel):
    """What a file was when it was written."""

    bytes: Size
    sha256: str | None


class Sealed(BaseModel):
    """A manifest: what the writer said (``kind``, ``about``), and the files by relative name."""

    format: Literal[1] = 1
    kind: str
    about: dict[str, Any]
    files: dict[str, File]


def seal(folder: Path, kind: str, about: Mapping[str, Any]) -> None:
    """Sync and hash everything in ``folder``, then write its manifest. Raise OSError if anything is a link."""
    paths = [path for path in _files(folder) if path.name != MANIFEST or path.parent != folder]
    by_size = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    with _threads() as pool:
        synced = [pool.submit(sync, path) for path in by_size]
        sizes = dict(zip(by_size, pool.map(size_and_hash, by_size), strict=True))
        for waiting in synced:
            waiting.result()
    for path in reversed(inside(folder)):
        if path.is_dir():
            sync(path)
    files = {_name(folder, path): File(bytes=sizes[path][0], sha256=sizes[path][1]) for path in sorted(paths)}
    sealed = Sealed(kind=kind, about=dict(about), files=files)
    replace_file(folder / MANIFEST, signed(sealed.model_dump()))  # syncs the folder as well


def read(folder: Path, kind: str) -> Sealed:
    """What the manifest of ``folder`` says. Raise Damaged if it is not what ``seal`` has written for this ``kind``."""
    try:
        sealed = read_signed(folder / MANIFEST, Sealed)
    except FileNotFoundError:
        raise Damaged(f"there is no {MANIFEST} in it") from None
    except Damaged as error:
        raise Damaged(f"{MANIFEST} {error}") from None
    if sealed.kind != kind:
        raise Damaged(f"{MANIFEST} is of the kind {sealed.kind}, not {kind}")
    return sealed


def identity(folder: Path, kind: str) -> str:
    """A hash of all that the manifest of ``folder`` says, and so of every byte that was sealed. Raise Damaged."""
    return digest_of(read(folder, kind).model_dump())


def damage(folder: Path, sealed: Sealed) -> list[str]:
    """One line, without the folder's name, for every file that is not what was sealed. Reads every byte."""
    lines = [f"{name!r}: not a name inside the folder" for name in sealed.files if not _is_inside(name)]
    if lines:
        return lines
    expected = {name: folder / name for name in sealed.files}
    try:
        present = {_name(folder, path) for path in _files(folder)} - {MANIFEST}
    except OSError as error:
        return [str(error)]
    lines += [f"{name}: not in the manifest" for name in sorted(present - expected.keys())]
    with _threads() as pool:
        findings = dict(zip(expected, pool.map(_found, expected.values()), strict=True))
    for name, file in sealed.files.items():
        if isinstance(finding := findings[name], str):
            lines.append(f"{name}: {finding}")
        elif finding[0] != file.bytes:
            lines.append(f"{name}: {finding[0]} bytes, {file.bytes} were written")
        elif finding[1] != file.sha256:
            lines.append(f"{name}: damaged, its hash is another")
    return lines


def intact(folder: Path, kind: str, about: Mapping[str, Any]) -> bool:
    """Whether ``folder`` was sealed as this ``kind`` with all of ``about``, and every byte in it is what was sealed."""
    try:
        sealed = read(folder, kind)
    except Damaged:
        return False
    return about.items() <= sealed.about.items() and not damage(folder, sealed)


def _found(path: Path) -> tuple[int, str] | str:
    try:
        return size_and_hash(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def size_and_hash(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    with opened(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def opened(path: Path) -> FileIO:
    """A file, open for reading. A pipe or a device in its place is an OSError; it would be waited for."""
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _files(folder: Path) -> Iterator[Path]:
    """Every file in ``folder`` and the folders in it. Raise OSError if one is a symbolic link."""
    for path in inside(folder):
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
    return ThreadPoolExecutor(usable_cores() + WAITING, "seal")


def signed(content: Any) -> str:
    """``content`` as JSON together with a hash of its own; for ``read_signed``."""
    return json.dumps({"sha256": digest_of(content), "content": content}, indent=1, allow_nan=False)


def read_signed(path: Path, kind: type[M]) -> M:
    """What ``signed`` was given. Raise FileNotFoundError; or Damaged, in words that follow the file's name: it cannot
    be read, is not what was written, or is of another format.
    """
    try:
        with opened(path) as file:
            document = json.loads(file.read())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError):
        raise Damaged("cannot be read") from None
    try:
        if document["sha256"] != digest_of(document["content"]):
            raise Damaged("is damaged, its hash is another")
        return kind.model_validate(document["content"])
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "literal_error":
            reads = f"this release reads {first['ctx']['expected']}; use the one that wrote it"
            raise Damaged(f"has format {first['input']}, {reads}") from None
        raise Damaged("is damaged, something is missing in it") from None
    except (KeyError, TypeError):
        raise Damaged("is damaged, something is missing in it") from None


def digest_of(content: Any) -> str:
    """SHA-256 of what JSON can hold; the order of keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
