"""The update of a bucket on the host, alone and beside a thread that launches operators without pause.

    python benchmarks/host_update.py --params 64 --rounds 21

The worker makes the update with as many threads as the engine gives it. Beside it are in turn: nothing; the main thread
of this process, which calls an operator of about 10 us again and again, as a training loop does; and another process
that does the same, which has no lock with the worker in common and takes as much of the machine. ``--one-by-one`` takes
the chunks of the bucket in a call each, as updates that are not Adam's do.

Seconds are medians over rounds. ``asleep`` is the part in which the worker neither ran nor waited for a core, by the
scheduler of Linux: it waited for Python's lock. Other load of the machine does not count there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.strategies.engine.transfer.worker import Worker, spare_cores
from deepstow.trainer.machine.rates import MIB, beside_launches, host_update

SMALL = 1 << 15  # elements: an operator on them takes about 10 us


class Took(NamedTuple):
    """Seconds of one update."""

    whole: float
    asleep: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=64, help="of the bucket, in units of 2^20")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=spare_cores(), help="of the worker")
    parser.add_argument("--fp32", action="store_true", help="gradients in fp32 instead of bf16")
    parser.add_argument("--one-by-one", action="store_true", help="a call for each chunk")
    return parser.parse_args(argv)


def launcher() -> Callable[[], object]:
    """What launches one operator."""
    return partial(nn.ReLU(inplace=True), torch.zeros(SMALL))


def timed(update: Callable[[], None]) -> Took:
    """In the worker: how long ``update`` takes."""
    began_s, scheduled_s = time.perf_counter(), _scheduled_s()
    update()
    whole_s = time.perf_counter() - began_s
    return Took(whole_s, whole_s - (_scheduled_s() - scheduled_s))


def _scheduled_s() -> float:
    """Seconds for which this thread has run or waited for a core."""
    words = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return sum(map(int, words[:2])) / 1e9


def other_process(runs: Any, ends: Any) -> None:
    """Launches operators while ``runs`` is set, until ``ends`` is."""
    torch.set_num_threads(1)
    launch = launcher()
    while not ends.is_set():
        if runs.wait(0.01):
            for _ in range(100):
                launch()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    given = parse(argv)
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    runs, ends = spawn.Event(), spawn.Event()
    process = spawn.Process(target=other_process, args=(runs, ends))
    process.start()
    update, launch = host_update(given.params * MIB, mixed=not given.fp32, at_once=not given.one_by_one), launcher()
    times: dict[str, list[Took]] = {"alone": [], "beside a thread": [], "beside a process": []}
    launched = 0

    def launch_one() -> None:
        nonlocal launched
        launched += 1
        launch()

    with closing(Worker(given.threads)) as worker:

        def submit(kept: list[Future[Took]]) -> Future[Any]:
            kept.append(worker.submit(0, partial(timed, update)))
            return kept[0]

        for number in range(2 + given.rounds):  # two warm up
            for beside, samples in times.items():
                updates: list[Future[Took]] = []
                if beside == "beside a process":
                    runs.set()
                    time.sleep(0.02)
                if beside == "beside a thread":
                    beside_launches(partial(submit, updates), launch_one)
                else:
                    submit(updates).result()
                runs.clear()
                if number > 1:
                    samples.append(updates[0].result())
    ends.set()
    process.join()
    alone_s = median(took.whole for took in times["alone"])
    print(f"{given.params} Mi parameters, {given.threads} threads, {given.rounds} rounds")
    for beside, samples in times.items():
        whole_s, asleep_s = (median(getattr(took, name) for took in samples) for name in Took._fields)
        took = f"{whole_s * 1e3:9.2f} ms  {whole_s / alone_s:6.3f} of alone  asleep {asleep_s * 1e3:7.2f} ms"
        print(f"{beside:<17}{took}")
    beside_s = sum(took.whole for took in times["beside a thread"])
    print(f"one launch takes {beside_s * (1 + 2 / given.rounds) / max(1, launched) * 1e6:.1f} us beside the update")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
