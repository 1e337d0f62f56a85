"""Run a function on N real ranks of this machine and collect what rank 0 returns.

Used to compare strategies with plain training (``launch/verify.py``) and by the tests. The ranks are forked from a
server process that has imported torch, DeepSpeed and Transformers once and has never run a kernel or opened a group
(a process forked after that may hang), so a world starts in a second instead of ten.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from strategies.engine.memory import accelerator
from trainer.dist.ranks import Ranks, describe, from_environment, process_group, settle_environment

PRELOAD = ["torch", "deepspeed", "transformers", "datasets", "accelerate", "trainer.run.order", "trainer.run.trainer"]


class WorldError(RuntimeError):
    """A rank failed. The message holds each rank's exit code and output."""


def run_world(num_ranks: int, work: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> Any:
    """``work(ranks, *args)`` on ``num_ranks`` processes with one process group; rank 0's return value.

    Args:
        work: a module-level function; its result on rank 0 must be something ``torch.save`` can write.

    Raises:
        WorldError: a rank ended with an error, by a signal, or not in time.
    """
    accelerated = accelerator.kind() is not None
    if not accelerated:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found nothing better
    # No driver survives a fork, CUDA's not even that of a process which has only asked whether there is a device.
    context: Any = multiprocessing.get_context("spawn" if accelerated else "forkserver")
    context.set_forkserver_preload(PRELOAD)  # no effect on a spawning context
    with tempfile.TemporaryDirectory(prefix="deepstow-world-") as name:
        folder = Path(name)
        port = describe(Ranks())["MASTER_PORT"]
        processes = [
            context.Process(target=_rank, args=(Ranks(rank, rank, num_ranks, num_ranks), port, folder, work, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        _wait(processes, time.monotonic() + timeout_s)
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise WorldError(_report(folder, codes))
        return torch.load(folder / "result", weights_only=True)


def _wait(processes: Sequence[Any], deadline_s: float) -> None:
    """Until all have ended, or one has failed, or the time is up; what still runs then is ended."""
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline_s:
        if any(process.exitcode for process in processes):
            deadline_s = min(deadline_s, time.monotonic() + 5.0)  # the others see their peer die and report it
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _report(folder: Path, codes: Sequence[int | None]) -> str:
    parts = [f"exit codes of the ranks: {codes}"]
    for rank in range(len(codes)):
        log = folder / f"log-{rank}"
        if log.exists():
            parts.append(f"--- rank {rank}\n{log.read_text(errors='replace')[-4000:]}")
    return "\n".join(parts)


def _rank(ranks: Ranks, port: str, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """One rank: output to a file, launcher variables, the work inside a group, the result to a file."""
    log = os.open(folder / f"log-{ranks.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update({**describe(ranks), "MASTER_PORT": port})
    settle_environment(ranks, len(os.sched_getaffinity(0)))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from trainer.run.run import quiet_libraries

    quiet_libraries()
    with process_group(from_environment(), 120, single=True):
        result = work(ranks, *args)
        if ranks.is_first:
            torch.save(result, folder / "result")
        del result
