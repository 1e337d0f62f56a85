"""What a run ends with: exit codes, and the errors that carry them.

A user error is one or more finished lines, each of which already names the file or key, the value, what is
allowed and the nearest match. ``launch`` prints the lines and exits with the code; there is no traceback.
This module imports nothing heavy, so a config can be refused before torch is loaded.
"""

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """The meaning of the process's exit code, the same for every command."""

    FINISHED = 0
    FAILED = 1
    CONFIG = 2
    DATA = 3
    PREEMPTED = 10
    OUT_OF_MEMORY = 11
    NON_FINITE = 12
    WATCHDOG = 13
    DISK = 14
    PEER_DIED = 15
    INTERRUPTED = 130  # by the keyboard; the shell's convention


class UserError(Exception):
    """Something the user can mend. ``lines`` are complete sentences, one per problem."""

    code: ExitCode = ExitCode.FAILED

    def __init__(self, lines: str | Iterable[str]) -> None:
        self.lines: tuple[str, ...] = (lines,) if isinstance(lines, str) else tuple(lines)
        super().__init__("\n".join(self.lines))


class ConfigError(UserError):
    """The config file, an override, or a combination of them cannot be run."""

    code = ExitCode.CONFIG


class CountingError(ConfigError, ValueError):
    """What backward keeps cannot be counted: a model's forward does not run on tensors without values."""


class DataError(UserError):
    """The data cannot be trained on; the line names file, row and field."""

    code = ExitCode.DATA


def first_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
