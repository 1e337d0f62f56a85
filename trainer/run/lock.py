"""One run at a time in a folder.

Two runs in one folder both succeed: their metrics are mixed, and each deletes the other's checkpoints and replaces its
export. So the first rank holds a lock of the kernel on the file ``run.lock``, which ends with the process however that
ends. What is in the file is for people, and for the case that the other process runs on another host of a network file
system, of which the kernel knows nothing. The holder touches the file every few seconds: a lock of another host, or of
a container that had another name, is in use if it is touched within ``WATCHED_S``, and is taken over otherwise.

The file can be removed by hand, and then a second run would make another one. So the folder itself is locked as well
(``flock``: a record lock needs a descriptor that can write). That lock is of the folder, whatever its name is by now,
and is inherited over a fork, so every process that is forked gives its copy back at once. Where a file system knows no
such lock, as NFS, which has record locks in its place, the file is all there is.

A run writes by the folder's name. If that is another folder by now, or none, it ends: it would make a new one there,
that it has not locked.

Invariant. Of two starters exactly one gets the lock; the other one is refused before any data is read. A symbolic link
in the place of the file is not followed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepstow.strategies.state.processes import is_ending, lives, started_at
from deepstow.trainer.distributed.exit_file import ROOM
from deepstow.trainer.errors import write_line

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

NAME = "run.lock"
KEY = "training.output_dir"
UNSUPPORTED = frozenset([errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
TOUCHED_S = 10.0  # between two touches of the holder
LOOKS = 2  # of the holder's in which the folder is another one, before it believes that
WATCHED_S = 90.0  # network file systems show a new time up to a minute later
ENDING_S = 30.0  # for how long a killed process may be about to go, with its memory
GONE_S, LOOK_S = 1.0, 0.05  # for how long its locks may be seen when it has gone; between two looks


class Holder(NamedTuple):
    """The process that holds a lock; ``start`` in Unix seconds."""

    pid: int
    host: str
    start: float

    def said(self) -> str:
        """For the line that refuses."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.start))
        return f"process {self.pid} on {self.host}, started {when}"


@contextmanager
def held(config: RunConfig, lost: Callable[[str], None]) -> Iterator[str]:
    """Inside, this process alone runs in the config's folder; gives what is in the lock's file. Raise ConfigError if
    that cannot be. ``lost`` ends the run with a line, from another thread, if the folder goes.
    """
    folder = Path(config.training.output_dir)
    path = folder / NAME
    try:
        new_folders = [parent for parent in (folder.absolute(), *folder.absolute().parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle, content = _take(config, path)
        folder_stat = folder.stat()
    except OSError as error:
        what = f"cannot be written ({error.strerror}); name another folder"
        raise config.error(KEY, config.training.output_dir, what) from None
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(handle, folder, folder_stat, over, lost), name="lock", daemon=True)
    thread.start()
    try:
        with _folder_held(config):
            yield content
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            path.unlink()  # while it is ours
        os.close(handle)
        if new_folders:
            with suppress(OSError):
                if [entry.name for entry in folder.iterdir()] == [ROOM]:  # the run was refused
                    (folder / ROOM).unlink()
        for new_folder in new_folders:
            with suppress(OSError):  # only what is empty
                new_folder.rmdir()


@contextmanager
def _folder_held(config: RunConfig) -> Iterator[None]:
    """Inside, this process alone has the folder itself locked, where that can be. Raise ConfigError if another has."""
    handles: list[int] = []  # the descriptor, while it is ours

    def close() -> None:
        while handles:
            os.close(handles.pop())

    with suppress(OSError):  # of a folder that cannot be read
        handles.append(os.open(config.training.output_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    os.register_at_fork(after_in_child=close)
    try:
        for handle in handles:
            _lock_folder(handle)
    except BlockingIOError:
        close()
        what = f"in use by another run, whose {NAME} was removed; wait for it, or name another folder"
        raise config.error(KEY, config.training.output_dir, what) from None
    except OSError:  # there are none here
        close()
    try:
        yield
    finally:
        for handle in handles:
            fcntl.flock(handle, fcntl.LOCK_UN)  # also of a copy in a process that was forked just now
        close()


def _lock_folder(handle: int) -> None:
    """Raise BlockingIOError if another process has it, and is not one that has just given the file's lock back."""
    end_s = time.monotonic() + GONE_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise
            time.sleep(LOOK_S)


def _watch(
    handle: int, folder: Path, locked: os.stat_result, over: threading.Event, lost: Callable[[str], None]
) -> None:
    """Touch the file, and look whether the folder is the one that is locked."""
    missed = 0
    while not over.wait(TOUCHED_S):
        with suppress(OSError):
            os.utime(handle)
        missed = 0 if _is_there(folder, locked) else missed + 1
        if missed == LOOKS:
            lost(f"{folder}: was moved or replaced while this run is in it, which ends; move it back, and start again")


def _is_there(folder: Path, locked: os.stat_result) -> bool:
    """Whether the folder is ours, as far as that can be known."""
    try:
        return os.path.samestat(folder.stat(), locked)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _is_touched(handle: int) -> bool:
    """Whether somebody touches the file within ``WATCHED_S``."""
    mtime_ns, end_s = os.fstat(handle).st_mtime_ns, time.monotonic() + WATCHED_S
    while time.monotonic() < end_s:
        time.sleep(min(1.0, WATCHED_S / 4))
        if os.fstat(handle).st_mtime_ns != mtime_ns:
            return True
    return False


def _take(config: RunConfig, path: Path) -> tuple[int, str]:
    """The descriptor that holds the lock on ``path``, and what is in it: our name."""
    began_s = time.monotonic()
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except FileNotFoundError:
            if path.parent.is_dir():
                raise
            continue  # a run that was refused has just removed the folder that it had made
        except OSError as error:
            if path.is_symlink():
                raise OSError(error.errno, f"{NAME} is a symbolic link") from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, f"{NAME} is no file")
            works = _lock(handle)
            holder = read(os.pread(handle, 4096, 0))
            if works is None:
                if holder is None or time.monotonic() - began_s > _patience_s(holder):
                    raise _refused(config, path, holder)
                time.sleep(LOOK_S)
                os.close(handle)
                continue
            if not _is_at(handle, path):  # the former holder has just removed it
                os.close(handle)
                continue
            ours = Holder(os.getpid(), socket.gethostname(), started_at(os.getpid()) or time.time())
            if holder is not None and holder.host != ours.host:
                write_line(f"{path}: of another host: {holder.said()}; watching whether it is in use")
                in_use = _is_touched(handle)
            else:  # a pid may be ours now, as 1 is in every container
                in_use = holder is not None and not works and holder.pid != ours.pid and lives(holder.pid, holder.start)
            if in_use:
                raise _refused(config, path, holder)
            content = json.dumps(ours._asdict())
            try:
                os.ftruncate(handle, 0)
                os.pwrite(handle, content.encode(), 0)
                os.fsync(handle)
            except OSError:
                with suppress(OSError):
                    path.unlink()  # it would look held
                raise
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        return handle, content


def _lock(handle: int) -> bool | None:
    """Whether the kernel gave us the lock: None if another process has it, False if it has no locks here.

    A record lock is the process's own: processes forked from it do not keep it alive.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        if error.errno in UNSUPPORTED:
            return False
        raise
    return True


def _patience_s(holder: Holder) -> float:
    """How long its lock is waited for: until a killed one is gone, whose threads end one after the other, and its
    locks with the last of them. One that is not there may have just gone, or is in another container.
    """
    if holder.host != socket.gethostname() or lives(holder.pid, holder.start):
        return 0.0
    return ENDING_S if is_ending(holder.pid, holder.start) else GONE_S


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def read(content: bytes) -> Holder | None:
    """The holder that a lock file names; None if it was not written to its end."""
    try:
        fields = json.loads(content)
        return Holder(int(fields["pid"]), str(fields["host"]), float(fields["start"]))
    except (ValueError, KeyError, TypeError):
        return None


def _refused(config: RunConfig, path: Path, holder: Holder | None) -> Exception:
    who = holder.said() if holder else "another process"
    what = f"in use by another run: {who}; wait for it, or name another folder"
    return config.error(KEY, config.training.output_dir, what)
