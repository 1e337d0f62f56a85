"""Who had a slot last, and which events free it.

A slot is memory that several users, buckets, take in turn. No user knows its predecessor: the plan gives each an
address, and users with equal addresses share a slot. ``Ring`` remembers the last user of each. Whoever owns the users
makes a ring for each kind of buffer (``updating/updates.py``, ``updating/gradients_down.py``).

Ordering. A user's own work in its slot is in order already: each of its steps waits for the one before. So one rule is
left, that of ``Ring.take``: **whoever writes a slot for its next user first waits for all that reads or writes it for
the last one.** That writer is a stream (``transfer.wait``) or the host (``transfer.host_wait``). ``take`` looks the
events up late, when the slot is taken: only then has the last user recorded all of them. If an update is still running
in the slot, its last event is not recorded yet; then ``left`` first settles that update.

UP, DOWN and COMPUTE are streams (``transfer/transfer.py``); ARRIVAL and PARKED are items of ``core/layout.py``; the
events are fields of ``BucketState`` and ``GradientState``.

    slot              written by            what its last user leaves
    visiting state    UP                    DOWN has stored the state (``stored``), which came after its update
    gradients         COMPUTE or UP         DOWN has read them (``sent``), COMPUTE has updated with them (``used``)
    ARRIVAL           DOWN                  the worker has added what was there (``added``)
    PARKED            DOWN                  the worker has updated with it (``taken``); of a resident in mixed precision
                                            UP has read the new weight, which the update has left there (``arrived``)
    disk windows      the slot's thread     all jobs queued for the last user are done, and UP has read the slot

A slot of a disk window (``WindowSlot``) needs no ring: it has a thread, which does what concerns the slot in the order
in which it was queued. Callers wait for the job that was queued last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from torch import Tensor

from deepstow.strategies.engine.transfer.transfer import Event

User = TypeVar("User")


class Ring(Generic[User]):
    """Slots of one kind. ``left`` gives the events after which a user neither reads nor writes its slot any more
    (None: nothing to wait for), after it has settled an update that is still running there.
    """

    def __init__(self, left: Callable[[User], Iterable[Event | None]]) -> None:
        self._left = left
        self._users: dict[int, User] = {}  # the last one, by address of the slot

    def last(self, slot: Tensor) -> User | None:
        """Who took ``slot`` last; None: nobody yet."""
        return self._users.get(slot.data_ptr())

    def take(self, slot: Tensor, user: User) -> Sequence[Event | None]:
        """Make ``user`` the user of ``slot``. Returns the last user's events, for which the caller lets its writer
        wait; nothing waits here.
        """
        former = self.last(slot)
        events = () if former is None else tuple(self._left(former))
        self._users[slot.data_ptr()] = user
        return events

    def finish(self) -> None:
        """Return when the host has done what all last users wait for."""
        for user in self._users.values():
            list(self._left(user))


def thread(name: str = "stow-disk") -> Executor:
    """A thread that does a slot's work, or a drive's, in order. Test doubles delay each job as long as they may."""
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
    """A slot of a disk window, and its thread. ``holds``: the number of the piece, or of the weight's bucket, that it
    has once the thread is done; ``expected``: those that come next.
    """

    def __init__(self, first: FirstError) -> None:
        self._first = first
        self._thread = thread()
        self._last: Future[None] | None = None
        self.holds: int | None = None
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
