"""Who had a slot last, and which events free it.

A slot is memory that several users take in turn. In the same order they come to it every step, but none knows who was
there before: the plan gives each user an address, and equal addresses are one slot. ``Ring`` remembers the last user.

Ordering. Every user's own work in its slot is in order: each of its steps waits for the one before. So one rule is
left, which ``Ring.take`` has: **whoever writes a slot for its next user first waits for all that reads or writes it for
the last one.** That writer is a stream (``transfer.wait``) or the host (``transfer.host_wait``). What it waits for is
looked up when the slot is taken, not when it was left, for by then the last user has all its events. An update that is
under way in the slot, and has no last event yet, settles first.

    slot              written by            what its last user leaves
    visiting state    UP                    DOWN has stored the state (``stored``), which came after its update
    gradients         COMPUTE or UP         DOWN has read them (``sent``), COMPUTE has updated with them (``used``)
    ARRIVAL           DOWN                  the worker has added what was there (``added``)
    PARKED            DOWN                  the worker has updated with it (``taken``); of a resident in mixed precision
                                            UP has read the new weight, which the update has left there (``arrived``)
    disk windows      the slot's thread     what it was given for the last user, a write among it; and UP has read it

The slots of a disk window (``WindowSlot``) have a thread each, and the order in which that is given its work is the
order of what it does there: so nobody else needs to wait for a last user. Others ask it for what it was given last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from torch import Tensor

from deepstow.strategies.engine.transfer.transfer import Event

User = TypeVar("User")


class Ring(Generic[User]):
    """Slots of one kind. ``left`` finds what a user has left in its slot: it settles an update under way there, and
    gives the events after which nothing of that user reads or writes the slot any more.
    """

    def __init__(self, left: Callable[[User], Iterable[Event | None]]) -> None:
        self._left = left
        self._users: dict[int, User] = {}  # the last one, by address of the slot

    def last(self, slot: Tensor) -> User | None:
        """Who took ``slot`` last, and has it still."""
        return self._users.get(slot.data_ptr())

    def take(self, slot: Tensor, user: User) -> Sequence[Event | None]:
        """``slot`` is now that of ``user``. Who writes it waits first for these events, of its last user."""
        former = self.last(slot)
        events = () if former is None else tuple(self._left(former))
        self._users[slot.data_ptr()] = user
        return events

    def finish(self) -> None:
        """Return when the host has done what all last users wait for."""
        for user in self._users.values():
            list(self._left(user))


def thread(name: str = "stow-disk") -> Executor:
    """What does a slot's work, or a drive's, one after the other; test doubles do it as late as it may be."""
    return ThreadPoolExecutor(1, name)


class FirstError:
    """Of what threads do: the first error is kept, nothing is done after it, and all who ask later raise it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, work: Callable[[], object]) -> None:
        if self._error is None:
            try:
                work()
            except Exception as error:
                self._error = error

    def refuse(self) -> None:
        if self._error is not None:
            raise self._error


class WindowSlot:
    """A slot of a disk window, and its thread. What it holds, and what is to come, are numbers."""

    def __init__(self, first: FirstError) -> None:
        self._first = first
        self._thread = thread()
        self._last: Future[None] | None = None
        self.holds: int | None = None  # once the thread is done
        self.expected: list[int] = []

    def give(self, work: Callable[[], object]) -> Future[None]:
        """The thread does ``work`` after all that it was given before."""
        self._last = self._thread.submit(self._first.run, work)
        return self._last

    def wait(self) -> None:
        """Return when the thread is done, or raise the first error of all threads."""
        if self._last is not None:
            self._last.result()
        self._first.refuse()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
