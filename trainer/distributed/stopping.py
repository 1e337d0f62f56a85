"""What asks a run to stop from outside: SIGTERM, SIGUSR1, a closed terminal (SIGHUP), Ctrl-C (SIGINT), and the end of
its launcher.

By default a signal ends the process, and all since the last checkpoint is lost. A handler in Python does not help
while the process waits for another rank in C++: Python calls it only when that wait is over. So the signal is also
written into a socket, by the interpreter's own handler in C, and a thread reads it there at once:

* while the run is *preparing*, ``Stopped`` is raised in the main thread; if that is stuck in C++, the thread ends the
  process after ``STUCK_S``. Nothing is saved, there is nothing yet;
* while it is *training*, the request is noted, and acted on at the end of the step by all ranks together
  (``SaveAndStop`` in ``trainer/run/callbacks/reports.py``). A save that is under way is finished;
* while it is *ending* (the export), the request is noted, and the export is finished;
* a second signal ends the process at once. A launcher often repeats what the process got itself, as with a signal to
  the whole group or job, so what comes within ``ECHO_S`` is the same request. So is a key that was pressed twice.

A launcher that has died is a request as well, which is made once: SIGTERM to ``deepspeed``, or SIGKILL to any launcher,
ends that process alone, and the ranks would live on and hold their devices. So a rank looks at the parents that it had
at its start, as far as they are launchers; a shell may well end before the run does.

Ctrl-C says that a person ends the run, and nobody is to start it again: its code is another one. It is the reason
wherever it comes with another signal, since `deepspeed` sends SIGTERM to ranks that have it from the terminal already.

SIGHUP and SIGINT stay ignored where they were, as under nohup and behind ``&``. Processes that are forked from this one
(loaders, tokenizers) have the default handlers: they are ended by their parent with SIGTERM, and must not pass it on.
SIGHUP and SIGINT they ignore: a terminal sends them to all, and without its loaders the run could not finish the step.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import FrameType
from typing import Any

import psutil

from deepstow.strategies.state.processes import lives
from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.errors import ExitCode, let_go, write_line

# Programs, and modules started with -m. ``accelerate launch`` starts torch's in its own process.
PROGRAMS = frozenset(["deepstow", "deepspeed", "deepspeed.pt", "ds", "torchrun", "accelerate", "accelerate-launch"])
MODULES = ("deepstow.launch.cli", "deepspeed.launcher", "torch.distributed", "accelerate.commands")
FILES = ("deepspeed/launcher/launch.py", "torch/distributed/run.py", "accelerate/commands/launch.py")
LONGEST_CHAIN = 4
TERMINALS = (signal.SIGHUP, signal.SIGINT)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, *TERMINALS)
LOOK_S = 0.5  # between two looks at the launcher
ECHO_S = 2.0  # the same signal, sent on by a launcher
STUCK_S = 5.0  # for the main thread to leave what it does
LAUNCHER = "the launcher has ended"
KEYBOARD = signal.SIGINT.name


def launchers() -> list[tuple[int, float]]:
    """Pid and start of the launchers that this process descends from: its parent first, each the child of the next."""
    chain: list[tuple[int, float]] = []
    with suppress(psutil.Error):
        for parent in psutil.Process().parents()[:LONGEST_CHAIN]:
            if not is_launcher(parent.cmdline()):
                break
            chain.append((parent.pid, parent.create_time()))
    return chain


def one_is_gone(chain: Sequence[tuple[int, float]]) -> bool:
    """Whether one of ``launchers`` has ended, so that nobody waits for this rank any more."""
    is_orphan = bool(chain) and os.getppid() != chain[0][0]
    return is_orphan or not all(lives(pid, start) for pid, start in chain)


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is that of a launcher: a program of that name, or an interpreter that runs one.

    Only what comes before the training script counts: its arguments may name anything.
    """
    if not command:
        return False
    name, *words = command
    if PurePath(name).name in PROGRAMS:
        return True
    if not PurePath(name).name.startswith(("python", "pypy")):
        return False
    for index, word in enumerate(words):
        if word == "-m":
            return " ".join(words[index + 1 : index + 2]).startswith(MODULES)
        if not word.startswith("-"):
            path = PurePath(word)
            return path.name in PROGRAMS or path.as_posix().endswith(FILES)
    return False


class Phase(Enum):
    """What a request to stop does now."""

    PREPARING = "preparing"
    TRAINING = "training"
    ENDING = "ending"


class Stopped(BaseException):
    """The run ends as it was asked to. Not an ``Exception``: libraries would take it for an error of theirs."""

    def __init__(self, line: str, code: ExitCode = ExitCode.PREEMPTED) -> None:
        super().__init__(line)
        self.line, self.code = line, code


def code_of(reason: str | None) -> ExitCode:
    """The exit code of a run that was asked to stop for that ``reason``."""
    return ExitCode.INTERRUPTED if reason == KEYBOARD else ExitCode.PREEMPTED


class Stop:
    """Whether this rank was asked to stop, by what, and what that does now. ``ended``: what it says when it ends."""

    def __init__(self, ended: ExitFile | None = None) -> None:
        self.ended = ended or ExitFile()
        self.reason: str | None = None
        self.phase = Phase.PREPARING
        self.launchers: list[tuple[int, float]] = []
        self._asked_s = 0.0
        self._expected = 0  # signals that this process has sent to itself
        self._raised = False  # once: what is left then must not be cut short by an echo
        self._over = threading.Event()
        self._former: dict[signal.Signals, Any] = {}

    @property
    def is_asked(self) -> bool:
        return self.reason is not None

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Inside, requests are noted. To be entered by the main thread, once, before anything is prepared."""
        self.launchers = launchers()
        ours, interpreters = socket.socketpair()
        for end in (ours, interpreters):
            end.setblocking(False)
        former_fd = signal.set_wakeup_fd(interpreters.fileno(), warn_on_full_buffer=False)
        ignored = {sig for sig in TERMINALS if signal.getsignal(sig) is signal.SIG_IGN}
        self._former = {sig: signal.signal(sig, self._handle) for sig in SIGNALS if sig not in ignored}
        _default_in_children(self)
        thread = threading.Thread(target=self._listen, args=(ours,), name="stopping", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.leave()
            signal.set_wakeup_fd(former_fd)
            with suppress(BlockingIOError):  # full: the thread is awake
                interpreters.send(b"\0")  # no signal's number
            thread.join()
            ours.close()
            interpreters.close()

    def leave(self) -> None:
        """Nothing is left to be saved: from here on signals end the process as they do without us."""
        self._over.set()
        for sig, handler in self._former.items():
            signal.signal(sig, handler)
        self._former = {}

    def wait(self, seconds_s: float) -> None:
        """Sleep so long, or until this rank is asked to stop."""
        end_s = time.monotonic() + seconds_s
        while not self.is_asked and time.monotonic() < end_s:
            time.sleep(0.1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, when Python comes to it."""
        if self.reason is None:
            self._asked_s = time.monotonic()
        if self.reason is None or number == signal.SIGINT:
            self.reason = signal.Signals(number).name
        if self.phase is Phase.PREPARING and not self._raised:
            self._raised = True
            raise Stopped(self._unsaved(), code_of(self.reason))

    def _unsaved(self) -> str:
        return f"{self.reason}: stopped before training began; nothing was saved"

    def _listen(self, ours: socket.socket) -> None:
        """In a thread of its own, whatever the main thread does."""
        gone = False
        while not self._over.is_set():
            ready, _, _ = select.select([ours], [], [], LOOK_S)
            for number in ours.recv(64) if ready else b"":
                if number in SIGNALS:
                    self._request(signal.Signals(number))
            if not gone and one_is_gone(self.launchers):
                gone = True
                self._launcher_is_gone()
            if self.is_asked and self.phase is Phase.PREPARING and time.monotonic() - self._asked_s > STUCK_S:
                self.end(self._unsaved(), code_of(self.reason))

    def _request(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            let_go()
        if self._expected:
            self._expected -= 1
            return
        now_s = time.monotonic()
        if self.reason is None or self._asked_s == 0.0:
            self.reason, self._asked_s = self.reason or number.name, now_s
        elif now_s - self._asked_s > ECHO_S:
            self.end(f"{number.name} a second time: ended at once", 128 + number)
        if number is signal.SIGINT:
            self.reason = KEYBOARD
        if self.phase is Phase.ENDING:
            line = "training is over, the export is finished first; a second signal ends it at once"
            write_line(f"{number.name}: {line}", sys.stderr)
        elif self.phase is Phase.TRAINING and number is signal.SIGINT and self.ended.rank == 0:
            line = f"the step is finished and saved first; Ctrl-C once more, after {ECHO_S:.0f} s, ends the run at once"
            write_line(f"{number.name}: {line}", sys.stderr)

    def end(self, line: str, code: int) -> None:
        """Say why, and end this process at once; from any thread."""
        write_line(line, sys.stderr)
        self.ended.write(code)
        os._exit(code)

    def _launcher_is_gone(self) -> None:
        if self.is_asked:
            return
        self.reason, self._asked_s = LAUNCHER, time.monotonic()
        if self.phase is Phase.PREPARING:
            self._expected += 1
            os.kill(os.getpid(), signal.SIGTERM)  # so that the main thread leaves what it does


def _default_in_children(stop: Stop) -> None:
    """Processes that are forked from here on have the default handlers and do not write into our socket.

    A signal that comes to the child before that waits until its handlers are the default ones.
    """
    reference = weakref.ref(stop)

    def mask(how: int) -> None:
        if (live := reference()) is not None and live._former:
            signal.pthread_sigmask(how, SIGNALS)

    def default() -> None:
        if (live := reference()) is not None and live._former:
            signal.set_wakeup_fd(-1)
            for sig in live._former:
                signal.signal(sig, signal.SIG_IGN if sig in TERMINALS else signal.SIG_DFL)
            live._former = {}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    os.register_at_fork(
        before=partial(mask, signal.SIG_BLOCK),
        after_in_parent=partial(mask, signal.SIG_UNBLOCK),
        after_in_child=default,
    )
