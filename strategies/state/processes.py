"""Whether a process of this machine lives: a pid is used again, so it counts with the time at which it began."""

from __future__ import annotations

import psutil

SAME_START_S = 2.0  # the kernel counts from its boot, and the clock may have been set since


def started_at(pid: int) -> float | None:
    """When a process of this machine began (seconds, Unix); None if it has ended. With the pid it is unique."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:  # it lives and belongs to somebody else
        return -1.0


def lives(pid: int, start: float) -> bool:
    """Whether the process of this machine that began at ``start`` has not ended, as far as that can be seen."""
    now = started_at(pid)
    return now is not None and (now < 0 or abs(now - start) < SAME_START_S)


def is_ending(pid: int, start: float) -> bool:
    """Whether the process of this machine that began at ``start`` has been killed, and not all of it has ended."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and abs(process.create_time() - start) < SAME_START_S
    except psutil.Error:
        return False
