"""Whether this rank's launcher still lives.

Problem. SIGTERM to the ``deepspeed`` command ends that process alone: the process that it started, and the ranks, live
on, hold their devices, and nobody waits for them. The same happens with every launcher that is killed with SIGKILL.

So each rank looks at the parents that it had at its start, as far as they are launchers. The parent of a run that was
started by hand is a shell, which may well end before the run does (nohup), so it is not looked at.

Refused: nothing. Where there is no /proc, parents are found by ``psutil`` as well.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

# Programs, and modules started with -m. ``accelerate launch`` starts torch's in its own process.
PROGRAMS = frozenset(["deepspeed", "deepspeed.pt", "ds", "torchrun", "accelerate", "accelerate-launch"])
MODULES = ("deepspeed.launcher", "torch.distributed", "accelerate.commands")
FILES = ("deepspeed/launcher/launch.py", "torch/distributed/run.py", "accelerate/commands/launch.py")
LONGEST_CHAIN = 4


@dataclass(frozen=True, slots=True)
class Launcher:
    """Processes from this rank's parent upwards, each the child of the next: pid and start time."""

    chain: tuple[tuple[int, float], ...]

    @property
    def is_there(self) -> bool:
        """Whether this rank has a launcher at all."""
        return bool(self.chain)

    def is_gone(self) -> bool:
        """Whether one of the processes has ended, so that nobody waits for this rank any more."""
        if self.chain and os.getppid() != self.chain[0][0]:
            return True
        return any(started_at(pid) != start for pid, start in self.chain)


def find() -> Launcher:
    """The launchers that this process descends from, at its start."""
    import psutil

    chain: list[tuple[int, float]] = []
    with suppress(psutil.Error):
        for parent in psutil.Process().parents()[:LONGEST_CHAIN]:
            if not is_launcher(parent.cmdline()):
                break
            chain.append((parent.pid, parent.create_time()))
    return Launcher(tuple(chain))


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


def started_at(pid: int) -> float | None:
    """When a process of this machine began (seconds, Unix); None if it has ended. With the pid it is unique."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:  # it lives and belongs to somebody else
        return -1.0
