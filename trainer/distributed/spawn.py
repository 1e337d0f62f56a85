"""Run a function on N real ranks of this machine and collect what rank 0 returns.

Used by ``deepstow verify`` to compare strategies with plain training, and by the tests. The ranks are forked from a
server process that has imported what they need (``preloaded.py``), so they start at once instead of in ten seconds.
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

from deepstow.strategies.core.cgroups import usable_cores
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.distributed.ranks import (
    Ranks,
    describe,
    from_environment,
    process_group,
    quiet_libraries,
    settle_environment,
)

PRELOAD = ["deepstow.trainer.distributed.preloaded"]


class WorldError(RuntimeError):
    """A rank failed. The message has the exit code and the output of each rank."""


def run_world(
    num_ranks: int,
    work: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300.0,
    deepspeed: bool = True,
    threads: int | None = None,
) -> Any:
    """Run ``work(ranks, *args)`` in ``num_ranks`` processes with one process group; returns rank 0's result.
    Raise WorldError if a rank ended with an error, by a signal, or not in time.

    Args:
        work: a module-level function; ``torch.save`` must be able to write its result.
        deepspeed: open DeepSpeed's communication as well, which on CPUs compiles an extension at first use.
        threads: of torch in each rank; by default what a run of ``deepstow train`` has.
    """
    accelerated = accelerator.kind() is not None
    if not accelerated:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
    # A driver does not survive a fork, CUDA's not even if the process has only asked whether there is a device.
    context: Any = multiprocessing.get_context("spawn" if accelerated else "forkserver")
    context.set_forkserver_preload(PRELOAD)  # no effect on a spawning context
    with tempfile.TemporaryDirectory(prefix="deepstow-world-") as name:
        folder = Path(name)
        port = describe(Ranks())["MASTER_PORT"]
        processes = [
            context.Process(
                target=_rank,
                args=(Ranks(rank, rank, num_ranks, num_ranks), port, folder, work, args, deepspeed, threads),
            )
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
    """Wait until all have ended, one has failed, or the time is up; then kill those that still run."""
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


def _rank(
    ranks: Ranks,
    port: str,
    folder: Path,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    deepspeed: bool,
    threads: int | None,
) -> None:
    """The main function of a rank: output goes to a file, work runs inside a group, the result goes to a file."""
    log = os.open(folder / f"log-{ranks.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update({**describe(ranks), "MASTER_PORT": port})
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    settle_environment(ranks, usable_cores())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    quiet_libraries()
    with process_group(from_environment(), 300, single=deepspeed):
        result = work(ranks, *args)
        if ranks.is_first:
            torch.save(result, folder / "result")
        del result
