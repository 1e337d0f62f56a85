"""Exit codes, the errors of users that carry them, and how lines are printed.

A ``UserError`` holds one or more complete lines, each of which names the file or key, the value, what is allowed and
the most similar name. ``launch`` prints the lines without a traceback and exits with the code. This module imports
nothing heavy, so that a bad config is refused before torch is loaded.
"""

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TextIO
from unicodedata import category

WARNING = "WARNING: "
BOLD, PLAIN = "\x1b[1;33m", "\x1b[0m"  # bold and yellow


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


MEANINGS: dict[int, str] = {
    ExitCode.FINISHED: "finished",
    ExitCode.FAILED: "failed",
    ExitCode.CONFIG: "the config or the command line cannot be run",
    ExitCode.DATA: "the data cannot be trained on",
    ExitCode.PREEMPTED: "asked to stop, and saved where there was something to save",
    ExitCode.OUT_OF_MEMORY: "out of memory",
    ExitCode.NON_FINITE: "gradients or loss are not finite any more",
    ExitCode.WATCHDOG: "a rank, or a process that loads its batches, gave no sign of life",
    ExitCode.DISK: "the disk: asked to stop and could not save, the disk tier failed, no room to begin, to load or to "
    "export, or the folder was moved",
    ExitCode.PEER_DIED: "another rank, or a process that loads batches, has died",
    ExitCode.INTERRUPTED: "interrupted from the keyboard, and saved where there was something to save",
}


class UserError(Exception):
    """Something that the user can fix. ``lines`` are complete sentences, one per problem."""

    code: ExitCode = ExitCode.FAILED

    def __init__(self, lines: str | Iterable[str]) -> None:
        self._lines: tuple[str, ...] = (lines,) if isinstance(lines, str) else tuple(lines)
        super().__init__()

    @property
    def lines(self) -> tuple[str, ...]:
        """Complete sentences, one per problem."""
        return self._lines

    def rewrite(self, change: Callable[[str], str]) -> None:
        """Say ``change`` of each line that is known already."""
        self._lines = tuple(map(change, self._lines))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def says_more(self) -> bool:
        """Whether ``more`` has anything to say, known at once."""
        return False

    def more(self) -> Iterable[str]:
        """Further lines that take seconds to find; to be printed after the others."""
        return ()


class ConfigError(UserError):
    """The config file, an override, or a combination of keys cannot be run."""

    code = ExitCode.CONFIG


class TooLargeError(ConfigError):
    """Memory is not enough: ``needed`` bytes on the ``tier`` (device or host), of which there may be ``budget``.

    ``what_fits`` makes the table of what would fit; it may fail in any way.

    Args:
        find_line, find_needed: may take seconds; they are called if somebody reads what they find.
    """

    def __init__(self, find_line: Callable[[], str], tier: str, find_needed: Callable[[], int], budget: int) -> None:
        super().__init__(())
        self.tier, self.budget = tier, budget
        self._find_line, self._find_needed = cache(find_line), cache(find_needed)
        self.what_fits: Callable[[], Iterable[str]] | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        return (self._find_line(),)

    @property
    def needed(self) -> int:
        """Bytes that would be enough."""
        return self._find_needed()

    @property
    def says_more(self) -> bool:
        return self.what_fits is not None

    def more(self) -> Iterable[str]:
        """The table, or one line that says why there is none."""
        try:
            return list(self.what_fits() if self.what_fits else ())
        except Exception as error:  # the refusal has been said; nothing may come in its place
            return [f"what would fit cannot be shown: {first_line(error)}"]


class CountingError(ConfigError, ValueError):
    """A model's forward does not run on fake tensors, so what it saves for backward cannot be counted."""


class DiskFails(UserError):
    """A disk does not give or take what the run, its checkpoint or its export needs."""

    code = ExitCode.DISK


class DataError(UserError):
    """The data cannot be trained on; the line names file, row and field."""

    code = ExitCode.DATA


def printable(text: str) -> str:
    """``text`` on one line, with control characters escaped: what others wrote moves no cursor and colours nothing."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def printable_lines(text: str) -> str:
    """Lines likewise; spaces of other widths, which texts in other languages have, stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() or category(char) == "Zs" else _escaped(char) for char in text
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def report(error: UserError) -> None:
    """Say the lines of ``error``, and what it can add to them, once: below the traceback of torch's launcher, which
    shows there what a rank leaves for it, or on stderr, at once.
    """
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        message = printable_lines("\n".join(["", *error.lines, *error.more()]))
        content = json.dumps({"message": message, "timestamp": int(time.time())})
        with suppress(OSError):
            Path(file).write_text(content)
            return
    write_line("\n".join(error.lines), sys.stderr)
    for line in error.more():
        write_line(line, sys.stderr)


def warning(line: str) -> str:
    """``line`` as one that people must not miss; ``write_line`` prints it in bold and yellow on a terminal."""
    return f"{WARNING}{line}"


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Print one line and flush it, so that a log that is followed or cut off stays readable; on stdout by default.
    Every text in which there may be something of others goes this way, or is ``printable`` before.

    A terminal that was closed, or a pipe that nobody reads any more, ends no run: it goes on, and saves.
    """
    try:
        text = printable_lines(line)
        if WARNING in text and (stream or sys.stdout).isatty():
            text = "\n".join(f"{BOLD}{row}{PLAIN}" if row.startswith(WARNING) else row for row in text.split("\n"))
        print(text, file=stream, flush=True)
    except OSError:
        let_go()


def write_nothing(line: str) -> None:
    """In the place of ``write_line``, on ranks that say nothing."""


def let_go() -> None:
    """What is printed goes nowhere from here on, where nobody is at the other end of standard output or error."""
    poll = select.poll()
    for handle in (1, 2):
        poll.register(handle, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for handle, _ in poll.poll(0):  # a hangup, or an error
        os.dup2(nowhere, handle)
    os.close(nowhere)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean 'x'?`` with the most similar of ``known``; empty if none is similar."""
    close = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_file(path: Path) -> str:
    """The same for a file that is missing: the most similar name in its folder."""
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean '{path.with_name(close[0])}'?" if close else ""


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def kind(value: object) -> str:
    """A value's type in words, such as "a string"."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")
