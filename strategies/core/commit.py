"""Put a file or a folder in its place whole or not at all, whatever ends the process or the machine.

Problem. A file that is written in place is half a file if the process is killed, and a file that is renamed before its
bytes are on the disk may be empty after a power cut.

So everything is written beside its place, synced, renamed, and the folder that holds the name is synced as well::

    replace_file(run / "plan.json", text)
    with replaced_folder(run / "export") as draft:      # a kill leaves the earlier export or the new one
        model.save_pretrained(draft)

Invariant. At every moment the place holds the earlier content or the new one, both complete. A folder cannot be
exchanged in one step: a kill between the two renames leaves the earlier one under ``earlier(folder)``.

An ``OSError`` from the block or from the disk leaves the earlier content, and removes what was written beside it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Make ``content`` the content of ``path``; several processes may do so at once. The folder must exist.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _sync(path.parent)


def refuse_unwritable(path: Path) -> None:
    """Raise OSError if a file cannot be written beside ``path``, as ``replace_file`` will have to."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    draft.touch()
    draft.unlink()


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` if the block succeeds. One process at a time.

    Raises:
        OSError: it cannot be written or renamed.
    """
    with _draft(folder.with_name(f"{folder.name}.writing")) as draft:
        yield draft
        _sync_all(draft)
        if folder.exists():
            _remove(earlier(folder))
            folder.rename(earlier(folder))
        try:
            draft.rename(folder)
            _sync(folder.parent)
        except OSError:
            if folder.exists():
                folder.rename(draft)
            if earlier(folder).exists():
                earlier(folder).rename(folder)
            raise
    shutil.rmtree(earlier(folder), ignore_errors=True)


@contextmanager
def added_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``folder`` if the block succeeds.

    Several processes may make the same folder at once: the first to finish wins, and the others drop theirs.

    Raises:
        OSError: it cannot be written or renamed.
    """
    with _draft(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")) as draft:
        yield draft
        _sync_all(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        _sync(folder.parent)


def earlier(folder: Path) -> Path:
    """Where ``replaced_folder`` keeps the earlier content until the new one has its name."""
    return folder.with_name(f"{folder.name}.earlier")


@contextmanager
def _draft(draft: Path) -> Iterator[Path]:
    _remove(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # if it has taken its place, there is none


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)
