"""Time and memory that a chat template may take: it comes with a model, and loops inside of loops take days.

Invariant. What runs inside ``bounded`` ends: after ``SECONDS`` of the process's own time, so that a machine that is
busy or stood still refuses nothing, or as soon as it asks for more than ``BYTES`` of memory. Python looks for signals
between two operations of a template; a single one that is long needs as much memory, but for a power, whose operator is
refused in the template's text.

The timer is the main thread's, and processes that tokenise have no other. Limits are put back at the end.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2

from deepstow.trainer.errors import DataError

SECONDS, BYTES = 3.0, 1 << 30
MOST_CHARACTERS = 1 << 20  # of a template; the longest known ones have 20,000
CURE = "take the loop out in a copy, or name another template in data.chat_template"


class TooLong(Exception):
    """The time is over."""


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Raise DataError if what runs inside, a template of this ``name``, takes too much; see the module."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if used := _address_space():
            soft = used + BYTES
            finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min([soft, *finite]), limits[1]))
        with _timer():
            yield
    except TooLong:
        raise DataError(f"{name}: one conversation takes over {SECONDS:g} s to render; {CURE}") from None
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        raise DataError(f"{name}: one conversation takes over 1 GiB to render; {CURE}") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def refuse(name: str, text: str) -> None:
    """Raise DataError for the ``text`` of a template that could not be bounded."""
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"{name}: has {len(text):,} characters, and no template has over {MOST_CHARACTERS:,}")
    try:
        powers = [line for line, kind, word in jinja2.Environment().lex(text) if kind == "operator" and word == "**"]
    except jinja2.TemplateSyntaxError:  # said with its line when it is compiled
        return
    if powers:
        raise DataError(f"{name}:{powers[0]}: computes a power (**), which may take hours; write the number itself")


@contextmanager
def _timer() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGVTALRM, _over)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:  # also if it was over at that moment
        signal.signal(signal.SIGVTALRM, former)


def _over(number: int, frame: Any) -> None:
    raise TooLong


def _address_space() -> int:
    """Bytes of addresses that the process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
