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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepstow.strategies.state.processes import lives, started_at
from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.errors import ExitCode

MOST_S, PER_TIMEOUT = 5.0, 8.0  # between two beats: so often per timeout, and at least every 5 s
GRACE_S = 20.0  # for a death to be noticed by those who wait for the rank
TELLING_S = 3.0  # for the others to read why, before the store ends with the first rank
END = "watchdog/end"
OWN_THREADS = ("watchdog", "stopping")


class Beat(NamedTuple):
    """What a rank says about itself, in this order in the store."""

    number: int
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
        if beat is not None and (self.beat is None or beat.number != self.beat.number):
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

    def heard(self, now_s: float) -> str:
        """What is known of it, for people."""
        if self.beat is None:
            return "never heard of"
        if self.beat.left:
            return "has ended as it should"
        return f"{self.beat.doing}, heard of {now_s - self.changed_s:.1f} s ago"

    def excuse(self, seconds_s: float) -> None:
        """This process was stopped for so long, which is nobody's silence."""
        self.changed_s += seconds_s
        self.dead_s = None if self.dead_s is None else self.dead_s + seconds_s


def interval_s(timeout_s: float) -> float:
    """Seconds between two beats."""
    return min(MOST_S, timeout_s / PER_TIMEOUT)


class Watchdog:
    """The threads of one rank. The job's ``store`` is cloned: who waits on it would make these threads wait."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.doing = "preparing"
        self.ended = ExitFile()
        self._told: str | None = None
        self._where = ""
        self._over = threading.Event()
        pid = os.getpid()
        self._beat = Beat(0, self.doing, pid, socket.gethostname(), started_at(pid) or 0.0)
        self._peers = [Peer(peer) for peer in (range(world_size) if rank == 0 else [0]) if peer != rank]
        self._store = store.clone()
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
        while not self._beat.left:
            left = self._over.wait(interval_s(self.timeout_s))
            self._beat = self._beat._replace(number=self._beat.number + 1, doing=self.doing, left=left)
            with suppress(RuntimeError):  # the store has ended with the first rank, whose process is looked at
                self._store.set(f"watchdog/{self.rank}", json.dumps(self._beat))
                if not left:
                    self._read()

    def _read(self) -> None:
        if self._told is not None and not self._store.check([END]):
            self._store.set(END, self._told)
        if self._store.check([END]):
            self._told = self._told or self._store.get(END).decode()
        for peer in self._peers:
            key = f"watchdog/{peer.rank}"
            if self._store.check([key]):
                peer.hear(Beat(*json.loads(self._store.get(key))), time.monotonic())

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
            is_there = beat is None or beat.host != self._beat.host or lives(beat.pid, beat.start)
            if fault := peer.fault(now_s, self.timeout_s, is_there=is_there):
                return fault
        return None

    def _end(self, why: str) -> None:
        self._told = why  # the other thread writes it into the store, unless that does not answer
        os.write(2, self._report(why).encode())  # at once, so that ranks are not mixed; Python's streams may be locked
        time.sleep(TELLING_S if self.rank == 0 else interval_s(self.timeout_s))
        self.ended.write(ExitCode.WATCHDOG)
        os._exit(ExitCode.WATCHDOG)

    def _report(self, why: str) -> str:
        """The reason, what this rank and others do, and the Python stacks of its threads."""
        names, now_s = {thread.ident: thread.name for thread in threading.enumerate()}, time.monotonic()
        code = int(ExitCode.WATCHDOG)
        lines = [f"watchdog: rank {self.rank} of {self.world_size} ends, exit code {code}: {why}"]
        lines += [f"  rank {peer.rank}: {peer.heard(now_s)}" for peer in self._peers]
        lines.append(f"rank {self.rank} was {self.doing}; its Python stacks:")
        lines += [f"    {line}" for line in self._where.splitlines()]
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, str(ident))
            if not name.startswith(OWN_THREADS):
                stack = "".join(traceback.format_stack(frame)).rstrip().splitlines()
                lines += [f"  rank {self.rank}, thread {name}:", *(f"    {line}" for line in stack)]
        return "\n".join(lines) + "\n"
