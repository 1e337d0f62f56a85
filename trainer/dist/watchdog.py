"""A watchdog in every rank: if a rank is stopped or dead, all ranks end with exit code 13 in bounded time.

A rank that waits in a collective for one that is stopped waits until its group's timeout, which some groups have not
from us, and says nothing about who is missing. So each rank's thread writes a count and what the rank does into the
job's store every few seconds, over a connection of its own. The first rank looks at all others, they look at it.

* A rank whose thread has not written for ``training.ddp_timeout`` is silent: its process is stopped, its machine is
  gone or not reachable. A slow rank is not silent: the thread writes while the rank computes, evaluates or saves.
* A rank whose process has ended on this machine without saying goodbye is dead, after a grace in which its peers and
  the launcher may notice it by themselves (that ends with exit code 15, and sooner).
* A collective that has waited for ``training.ddp_timeout`` fails, by its group; ``tell`` then ends all ranks.

Whoever finds it says so in the store. Then every living rank prints what it was doing and the Python stack of each of
its threads, and ends. Time for which a rank was itself stopped does not count as the others' silence.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.dist.stopping import lives, started_at
from trainer.errors import ExitCode

MOST_S, PER_TIMEOUT = 5.0, 8.0  # between two beats: so often per timeout, and at least every 5 s
GRACE_S = 20.0  # for a death to be noticed by those who wait for the rank
TELLING_S = 3.0  # for the others to read why, before the store ends with the first rank
END = "watchdog/end"
OWN_THREADS = ("watchdog", "stopping")


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says about itself."""

    count: int
    doing: str
    pid: int
    host: str
    start: float
    left: bool = False


@dataclass(slots=True)
class Peer:
    """What is known about another rank, by this process's monotonic clock."""

    rank: int
    beat: Beat | None = None
    changed_s: float = 0.0
    dead_s: float | None = None

    def hear(self, beat: Beat | None, now_s: float) -> None:
        """Note a beat that was read; only a new one is a sign of life."""
        if beat is not None and (self.beat is None or beat.count != self.beat.count):
            self.beat, self.changed_s = beat, now_s

    def fault(self, now_s: float, timeout_s: float, *, is_there: bool) -> str | None:
        """What is wrong with the rank; None if nothing is. ``is_there``: its process, as far as can be seen."""
        if self.beat is not None and self.beat.left:
            return None
        doing = f"; it was {self.beat.doing}" if self.beat else ""
        self.dead_s = None if is_there else (self.dead_s or now_s)
        if self.dead_s is not None and now_s - self.dead_s >= GRACE_S:
            return f"rank {self.rank}: its process has ended{doing}"
        if now_s - self.changed_s >= timeout_s:
            return f"rank {self.rank}: silent for {now_s - self.changed_s:.0f} s, stopped or not reachable{doing}"
        return None

    def excuse(self, seconds_s: float) -> None:
        """This process was stopped for so long, which is nobody's silence."""
        self.changed_s += seconds_s
        self.dead_s = None if self.dead_s is None else self.dead_s + seconds_s


def interval_s(timeout_s: float) -> float:
    """Seconds between two beats."""
    return min(MOST_S, timeout_s / PER_TIMEOUT)


@dataclass(eq=False)
class Watchdog:
    """The threads of one rank. The job's ``store`` is cloned: who waits on it would make these threads wait."""

    store: Any
    rank: int
    world_size: int
    timeout_s: float
    doing: str = "preparing"
    _told: str | None = None
    _where: str = ""
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        own = os.getpid()
        self._beat = Beat(0, self.doing, own, socket.gethostname(), started_at(own) or 0.0)
        self._peers = [Peer(rank) for rank in (range(self.world_size) if self.rank == 0 else [0]) if rank != self.rank]
        self._store = self.store.clone()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._exchange, "watchdog-exchange"), (self._watch, "watchdog"))
        ]

    def start(self) -> Watchdog:
        for peer in self._peers:
            peer.changed_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Say goodbye and end the threads; one that waits for a store that does not answer is left behind."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * interval_s(self.timeout_s))

    def tell(self, why: str, where: str) -> None:
        """End all ranks with exit code 13, for a reason found by this one, and a traceback. Does not return."""
        self._where = where
        time.sleep(2 * interval_s(self.timeout_s))  # a silent rank says more than that it was waited for
        self._told = self._told or f"rank {self.rank}: {why}"
        threading.Event().wait()

    # --- what the rank says and hears, in a thread that may have to wait for the store --------------------------------

    def _exchange(self) -> None:
        count = 0
        while not self._over.wait(interval_s(self.timeout_s)):
            count += 1
            self._write(count)
        self._write(count + 1, left=True)

    def _write(self, count: int, *, left: bool = False) -> None:
        try:
            beat = {**asdict(self._beat), "count": count, "doing": self.doing, "left": left}
            self._store.set(f"watchdog/{self.rank}", json.dumps(beat))
            if left:
                return
            if self._told is not None and not self._store.check([END]):
                self._store.set(END, self._told)
            if self._store.check([END]):
                self._told = self._told or self._store.get(END).decode()
            for peer in self._peers:
                key = f"watchdog/{peer.rank}"
                if self._store.check([key]):
                    peer.hear(Beat(**json.loads(self._store.get(key))), time.monotonic())
        except RuntimeError:  # the store has ended with the first rank, whose process is looked at
            return

    # --- what it concludes, in a thread that never waits --------------------------------------------------------------

    def _watch(self) -> None:
        pause_s = interval_s(self.timeout_s)
        before_s = time.monotonic()
        while not self._over.wait(pause_s):
            now_s = time.monotonic()
            if (stopped_s := now_s - before_s - 2 * pause_s) > 0:
                for peer in self._peers:
                    peer.excuse(stopped_s + pause_s)
            before_s = now_s
            why = self._told or self._fault(now_s)
            if why is not None:
                self._end(why)

    def _fault(self, now_s: float) -> str | None:
        for peer in self._peers:
            beat = peer.beat
            there = beat is None or beat.host != self._beat.host or lives(beat.pid, beat.start)
            if fault := peer.fault(now_s, self.timeout_s, is_there=there):
                return fault
        return None

    def _end(self, why: str) -> None:
        self._told = why  # the other thread writes it into the store, unless that does not answer
        now_s = time.monotonic()
        heard = [f"rank {peer.rank}: {_heard(peer, now_s)}" for peer in self._peers]
        text = report(self.rank, self.world_size, why, self.doing, heard, self._where)
        os.write(2, text.encode())  # in one piece, so that ranks are not mixed; streams of Python may be locked
        time.sleep(TELLING_S if self.rank == 0 else interval_s(self.timeout_s))
        os._exit(ExitCode.WATCHDOG)


def _heard(peer: Peer, now_s: float) -> str:
    if peer.beat is None:
        return "never heard of"
    if peer.beat.left:
        return "has ended as it should"
    return f"{peer.beat.doing}, heard of {now_s - peer.changed_s:.1f} s ago"


def report(rank: int, world_size: int, why: str, doing: str, heard: Sequence[str], where: str) -> str:
    """What a rank prints before it ends: the reason, what it and others do, and the Python stacks of its threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"watchdog: rank {rank} of {world_size} ends, exit code {int(ExitCode.WATCHDOG)}: {why}"]
    lines += [f"  {line}" for line in heard]
    lines.append(f"rank {rank} was {doing}; its Python stacks:")
    lines += [f"    {line}" for line in where.splitlines()]
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith(OWN_THREADS):
            stack = "".join(traceback.format_stack(frame)).rstrip().splitlines()
            lines += [f"  rank {rank}, thread {name}:", *(f"    {line}" for line in stack)]
    return "\n".join(lines) + "\n"
