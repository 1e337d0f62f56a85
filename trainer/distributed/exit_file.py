"""``exit.json`` in the run's folder: with which code and for what reason a run has ended, for schedulers.

Launchers do not pass a rank's exit code on: ``torchrun`` and ``accelerate launch`` end with 1 whatever it was. So each
rank says what it ends with, in one file that is replaced in one step. It is removed when a run has the folder's lock;
where there is none, the run is under way, or its processes were killed.

The cause stays: a rank that ends because of another (13, 15) writes where nothing is written yet. One that ends with
all of them (0, 10, 130) replaces such a code as well, and every other code replaces whatever is there.

Invariant. 0 is written once all that the config asks for is there (exports, the upload), and all ranks have met after
that (``trainer/run/session.py``). A process that dies later, while it closes its groups, changes nothing of it: then
the launcher reports a failure, and the file says what is so.

What is there when a run ends before it has the lock is an earlier run's: the first rank replaces it, whatever it says.

A run that was refused because another one has the folder writes nothing, and nobody makes a folder for the file. Nor
does a rank write that ends late, when another run has the folder already, or the folder is another one by now: what is
in ``run.lock`` tells. A lock that a killed run has left is nobody's.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from deepstow.strategies.state.processes import lives
from deepstow.trainer.errors import MEANINGS, ConfigError, ExitCode

NAME, LOCK = "exit.json", "run.lock"
ROOM, ROOM_BYTES = ".exit.json", 1024  # on the disk since the run began, for one whose disk is full at its end
FOLLOWS = (ExitCode.WATCHDOG, ExitCode.PEER_DIED)
TOGETHER = (ExitCode.FINISHED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


class ExitFile:
    """What one rank has to say. ``step``: the newest that it has made; ``lock``: what the run has written into the lock
    of ``folder``, once it has it.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.folder: Path | None = None
        self.lock: str | None = None
        self.step: int | None = None

    def clear(self) -> None:
        """Remove the file of an earlier run, and keep room for ours. Raise ConfigError if that cannot be done."""
        if self.folder is None:
            return
        try:
            (self.folder / NAME).unlink(missing_ok=True)
            with suppress(OSError):  # the disk is full, which is said where it matters
                (self.folder / ROOM).write_text(" " * ROOM_BYTES)
        except OSError as error:
            raise ConfigError(f"{self.folder / NAME}: cannot be removed ({error.strerror}); remove it") from None

    def write(self, code: int) -> None:
        """This rank ends with ``code``. What cannot be written changes nothing."""
        folder = self.folder
        if folder is None or not os.path.isdir(folder):  # noqa: PTH112 - a name that is too long is no error there
            return
        if self.lock is None and (self.rank > 0 or _in_use(folder / LOCK)):
            return
        if self.lock is not None and _content(folder / LOCK) not in ("", self.lock):
            return
        fields = {
            "code": int(code),
            "meaning": MEANINGS.get(code, f"ended at once by signal {code - 128}, the second one"),
            "step": self.step,
            "rank": self.rank,
            "ranks": self.ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text, drafts = json.dumps(fields, indent=1) + "\n", [folder / f".{NAME}-{secrets.token_hex(4)}"]
        if code not in FOLLOWS:
            drafts.append(folder / ROOM)
        for draft in drafts:
            with suppress(OSError):
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o666), "w", encoding="utf-8") as file:
                    file.write(text)
                _put(draft, folder / NAME, code, anew=self.lock is None)
                break
        for draft in drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def code_in(folder: Path) -> int | None:
    """The code of the run in ``folder``; None while it is under way, or if it was killed."""
    try:
        return code_of((folder / NAME).read_bytes())
    except OSError:
        return None


def code_of(content: str | bytes) -> int | None:
    """The code that an ``exit.json`` of this content says; None: it says none."""
    try:
        code = json.loads(content)["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return code if type(code) is int else None


def _put(draft: Path, path: Path, code: int, *, anew: bool) -> None:
    """Give ``draft`` the name ``path``, unless what is there is of this run, not of one before (``anew``), and says
    more. Raises OSError.
    """
    if code in FOLLOWS + TOGETHER and not anew:
        with suppress(OSError):  # one is there, or the file system has no links
            path.hardlink_to(draft)  # in one step: another rank may be about to write the cause
            return
        if path.exists() and (code in FOLLOWS or code_in(path.parent) not in FOLLOWS):
            return
    draft.replace(path)


def _is_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there are no locks here
        return False
    finally:
        os.close(handle)
    return False


def _content(lock: Path) -> str:
    """What is in a lock; nothing if there is none, or if that cannot be known."""
    try:
        return lock.read_text()
    except (OSError, ValueError):
        return ""


def _in_use(lock: Path) -> bool:
    """Whether the run that has written the lock lives, or may; of another host nothing is known. One whose file was
    removed has the folder itself locked.
    """
    try:
        if not lock.exists():
            return _is_locked(lock.parent)
        holder = json.loads(lock.read_bytes()) if lock.is_file() else {}
        return bool(holder["host"] != socket.gethostname() or lives(holder["pid"], holder["start"]))
    except (OSError, ValueError, KeyError, TypeError):
        return True
