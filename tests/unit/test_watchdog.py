"""Who is taken for silent or dead, by a clock in the test's hand; and that a slow rank is never ended."""

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed

from deepstow.trainer.distributed.ranks import Ranks, describe, listening
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.distributed.watchdog import GRACE_S, Beat, Peer, Watchdog


def beat(count: int, *, left: bool = False) -> Beat:
    return Beat(count, "in step 7", 100, "here", 0.0, left)


def test_a_rank_is_silent_after_the_timeout_and_not_before() -> None:
    peer = Peer(3, changed_s=0.0)
    peer.hear(beat(1), 50.0)
    peer.hear(beat(1), 60.0)  # read again, not written again
    assert peer.fault(79.9, 30.0, is_there=True) is None
    fault = peer.fault(80.0, 30.0, is_there=True)
    assert fault == "rank 3: silent for 30 s, stopped or not reachable; it was in step 7"
    peer.hear(beat(2), 81.0)
    assert peer.fault(100.0, 30.0, is_there=True) is None


def test_a_dead_rank_is_left_to_its_peers_first() -> None:
    peer = Peer(1, changed_s=0.0)
    peer.hear(beat(1), 0.0)
    assert peer.fault(1.0, 1800.0, is_there=False) is None
    assert peer.fault(0.9 + GRACE_S, 1800.0, is_there=False) is None
    assert peer.fault(1.0 + GRACE_S, 1800.0, is_there=False) == "rank 1: its process has ended; it was in step 7"


def test_a_rank_that_has_said_goodbye_is_not_missed() -> None:
    peer = Peer(1)
    peer.hear(beat(9, left=True), 0.0)
    assert peer.fault(1e6, 10.0, is_there=False) is None


def test_time_in_which_this_rank_was_stopped_is_nobodys_silence() -> None:
    peer = Peer(1)
    peer.hear(beat(1), 0.0)
    assert peer.fault(10.0, 30.0, is_there=False) is None
    peer.excuse(1000.0)
    assert peer.fault(1009.9 + GRACE_S, 30.0, is_there=False) is None


def ranks(work: Callable[[int, Any], None], timeout_s: float) -> list[int | None]:
    """The exit codes of two processes with a watchdog that do ``work(rank, watchdog)``."""
    port = int(describe(Ranks())["MASTER_PORT"])

    def rank(number: int) -> None:
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, 2, number == 0, timedelta(seconds=30),
            master_listen_fd=listening(port) if number == 0 else None,
        )  # fmt: skip
        watchdog = Watchdog(store, number, 2, timeout_s).start()
        work(number, watchdog)
        watchdog.close()
        if number == 0:
            time.sleep(0.5)  # the store is its own
        os._exit(0)

    processes = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        process.kill()
    return [process.exitcode for process in processes]


def test_a_slow_rank_is_not_ended() -> None:
    """It does nothing for several timeouts, and the other one waits for it."""
    assert ranks(lambda number, watchdog: time.sleep(3.0), timeout_s=0.8) == [0, 0]


def test_when_one_gives_up_all_end() -> None:
    def gives_up(number: int, watchdog: Any) -> None:
        if number == 1:
            watchdog.tell("a collective has waited", "where it was")
        time.sleep(20)

    assert ranks(gives_up, timeout_s=2.0) == [13, 13]


def timeouts_after_the_beginning(ranks: Ranks) -> list[float]:
    """Seconds that the job's group and one that a library has made wait, once training has begun."""
    from transformers import TrainerState

    from deepstow.trainer.run.callbacks.reports import Watched

    groups: list[Any] = [torch.distributed.group.WORLD, torch.distributed.new_group(timeout=timedelta(days=7))]
    watchdog: Any = SimpleNamespace(timeout_s=7)
    Watched(watchdog).on_train_begin(None, TrainerState(), None)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_groups_that_libraries_make_get_the_runs_timeout() -> None:
    assert run_world(1, timeouts_after_the_beginning) == [7.0, 7.0]
