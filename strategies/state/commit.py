"""Put a file or a folder in its place whole or not at all, whatever ends the process or the machine.

A file that is written in place is half a file if the process is killed, and one that is renamed before its bytes are on
the disk may be empty after a power cut. So everything is written beside its place, synced, renamed, and the folder that
holds the name is synced as well. ``put_in_place`` is the exchange alone, for a draft that several processes have
written.

Invariant. At every moment the place holds the earlier content or the new one, both complete. A folder cannot be
exchanged in one step: a kill between the two renames leaves the earlier one under ``earlier(folder)``. An ``OSError``,
which any of these may raise, leaves the earlier content, and removes what was written beside it.

A folder that is a symbolic link is followed: what it points to is exchanged, on its own disk. Nothing is ever deleted
through a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EARLIER = ".earlier"


def replace_file(path: Path, content: str | bytes) -> None:
    """Make ``content`` the content of ``path``; several processes may do so at once. The folder must exist."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def refuse_unwritable(path: Path) -> None:
    """Raise OSError if a file cannot be written beside ``path``, as ``replace_file`` will have to."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    draft.touch()
    draft.unlink()


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes ``folder``'s place if the block succeeds. One process at a time."""
    folder = folder.resolve() if folder.is_symlink() else folder
    with _draft(folder.with_name(f"{folder.name}.writing")) as draft:
        yield draft
        _sync_all(draft)
        put_in_place(draft, folder)


def put_in_place(draft: Path, folder: Path) -> None:
    """Give ``draft``, which is on the disk, the name ``folder``; an earlier folder of that name is deleted after that.
    Raise OSError if it cannot be renamed, or no folder is in its place; what was there is still there.
    """
    if os.path.lexists(folder):
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, "not a folder, so it is not replaced", str(folder))
        remove(earlier(folder))
        folder.rename(earlier(folder))
    try:
        draft.rename(folder)
        sync(folder.parent)
    except OSError:
        if folder.exists():
            folder.rename(draft)
        if os.path.lexists(earlier(folder)):
            earlier(folder).rename(folder)
        raise
    with suppress(OSError):
        remove(earlier(folder))


def restore_earlier(folder: Path) -> None:
    """What a kill between the two renames of ``put_in_place`` has left: the earlier folder gets its name back."""
    if os.path.lexists(folder):
        remove(earlier(folder))
    elif os.path.lexists(earlier(folder)):
        earlier(folder).rename(folder)
        sync(folder.parent)


@contextmanager
def added_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``folder`` if the block succeeds. Of several processes that make it
    at once the first to finish wins, and the others drop theirs. What killed ones have left beside it is removed.
    """
    _remove_abandoned(folder.parent)
    with _locked(folder) as draft, _removed_at_end(draft):
        yield draft
        _sync_all(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync(folder.parent)


def earlier(folder: Path) -> Path:
    """Where ``replaced_folder`` keeps the earlier content until the new one has its name."""
    return folder.with_name(folder.name + EARLIER)


def remove(folder: Path) -> None:
    """Delete a folder with all that is in it, or nothing if there is none; of a symbolic link only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def inside(folder: Path) -> list[Path]:
    """Every file, link and folder in ``folder`` and the folders in it. Raise OSError if one cannot be listed, which
    ``rglob`` leaves out without a word.
    """

    def refuse(error: OSError) -> None:
        raise error

    paths = (Path(where, name) for where, inner, files in os.walk(folder, onerror=refuse) for name in (*inner, *files))
    return sorted(paths)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def same_modes(folder: Path) -> None:
    """Give every file in ``folder`` the mode of a new file, keeping that a file may be executed. Links are left alone.
    safetensors makes files that only their owner can read (0600), all else has the umask's mode.
    """
    probe = folder / f".mode-{secrets.token_hex(4)}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in inside(folder):
        if path.is_file() and not path.is_symlink():
            has = stat.S_IMODE(path.stat().st_mode)
            if has | mode != has:
                path.chmod(has | mode)


@contextmanager
def _draft(draft: Path) -> Iterator[Path]:
    remove(draft)
    draft.mkdir(parents=True)
    with _removed_at_end(draft):
        yield draft


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """A new empty folder beside ``folder``, which has a lock of the kernel for as long as this process lives.

    [Note: abandoned drafts] The lock ends with the process however that ends, so a draft whose lock can be had is
    nobody's. Locks of another kernel may not be seen through a network file system. So the name has the kernel's boot,
    and drafts of others are left alone. A draft that was removed before it had its lock is made again.
    """
    while True:
        draft = folder.with_name(f".{folder.name}-{_boot()}-{secrets.token_hex(4)}")
        draft.mkdir(parents=True)
        handle = os.open(draft, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks; then nobody can have this one either
                fcntl.flock(handle, fcntl.LOCK_EX)
            if draft.exists():
                yield draft
                return
        finally:
            os.close(handle)


def _remove_abandoned(parent: Path) -> None:
    """Remove drafts of ``added_folder`` whose processes have ended. See [Note: abandoned drafts]."""
    for draft in parent.glob(f".*-{_boot()}-*"):
        with suppress(OSError):  # it is in use, or another process is faster
            handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft)
            finally:
                os.close(handle)


def _boot() -> str:
    """Of the kernel that runs; in a container that of its host, whose locks it shares."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:  # no Linux: nothing that a kill leaves is found again
        return secrets.token_hex(16)


@contextmanager
def _removed_at_end(draft: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # if it has taken its place, there is none


def _sync_all(folder: Path) -> None:
    for path in [*inside(folder), folder]:
        sync(path)
