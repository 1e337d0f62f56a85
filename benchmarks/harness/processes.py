"""The processes of a benchmark: rounds, progress, failures.

Contenders take turns (A B C, A B C, ...), so that a machine that becomes slower does so for all of them. Each run is a
fresh process, so that its peak memory is its own. A contender that fails is a row of the table and is not run again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepstow
from deepstow.benchmarks.harness.work import Contender, Work
from deepstow.strategies.core.sizes import human, human_duration, human_number
from deepstow.trainer.distributed.ranks import GRACE_S, Ranks, describe

REPO = Path(deepstow.__file__).resolve().parents[1]  # or the folder that has the installed package
RUN_LIMIT_S = 1800

Run = dict[str, Any]  # what one run measured (``child.py``), or its reason under "failed"; a record holds it whole


def surroundings() -> Run:
    """Hardware and versions, asked of a child process so that this one allocates nothing on a device.

    Raises:
        RuntimeError: if the child fails.
    """
    with tempfile.TemporaryFile("w+") as log:
        told = child({}, log)
        log.seek(0)
        if "failed" in told:
            raise RuntimeError(f"cannot probe this machine: {told['failed']}\n{log.read()[-4000:]}")
    return told


def child(request: dict[str, Any], log: Any, num_ranks: int = 1) -> Run:
    """Run a request in fresh processes (``child.py``), one per rank; what they print goes to ``log``.

    Returns:
        The first rank's result, with the peak of that rank which needs the most host memory.
    """
    with tempfile.TemporaryDirectory(prefix="deepstow-bench-") as name:
        folder = Path(name)
        (folder / "request").write_text(json.dumps({**request, "out": name}))
        places = [describe(Ranks(rank, rank, num_ranks, num_ranks)) for rank in range(num_ranks)]
        meeting = {"MASTER_PORT": places[0]["MASTER_PORT"]}
        started = []
        for place in places:
            around = {**os.environ, **place, **meeting} if num_ranks > 1 else None
            with (folder / "request").open() as text:
                command = [sys.executable, "-m", "deepstow.benchmarks.harness.child"]
                started.append(subprocess.Popen(command, stdin=text, cwd=REPO, stdout=log, stderr=log, env=around))
        if not ended(started, time.monotonic() + RUN_LIMIT_S):
            return {"failed": f"not finished after {human_duration(RUN_LIMIT_S)}"}
        files = [folder / f"result-{rank}.json" for rank in range(num_ranks)]
        answers: list[Run] = [json.loads(file.read_text()) for file in files if file.exists()]
    codes = [process.returncode for process in started]
    for answer in answers:
        if "failed" in answer:
            return answer
    if len(answers) < num_ranks and -signal.SIGKILL in codes:
        return {"failed": "killed by signal 9, most likely because memory ran out"}
    if len(answers) < num_ranks:
        return {"failed": f"ended with code {next(filter(None, codes), 0)} without a result; see its log"}
    peaks = [answer["host_peak_bytes"] for answer in answers if "host_peak_bytes" in answer]
    return answers[0] | ({"host_peak_bytes": max(peaks)} if peaks else {})


def ended(started: Sequence[subprocess.Popen[Any]], deadline_s: float) -> bool:
    """Wait until all have ended, or one has failed and the others had the time to report. False: that took too long."""
    in_time = True
    while in_time and any(process.poll() is None for process in started):
        if any(process.returncode for process in started):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        time.sleep(0.05)
        in_time = time.monotonic() < deadline_s
    for process in started:
        process.kill()  # does nothing to those that have ended
        process.wait()
    return in_time or any(process.returncode for process in started)


def measure(
    work: Work, contenders: Sequence[Contender], rounds: int, logs: Path, say: Callable[[str], None]
) -> Iterator[Run]:
    """Yield every run as it ends, round by round, with its ``label``, ``round`` and ``wall_s``."""
    todo = [(number, contender) for number in range(1, rounds + 1) for contender in contenders]
    walls_s: list[float] = []
    while todo:
        number, contender = todo[0]
        remaining = f", about {human_duration(len(todo) * sum(walls_s) / len(walls_s))} left" if walls_s else ""
        say(f"round {number} of {rounds}: {contender.label}{remaining}")
        began_s = time.perf_counter()
        with (logs / f"{contender.label.replace(' ', '-')}-{number}.log").open("w") as log:
            run = child({"work": asdict(work), "contender": asdict(contender)}, log, work.ranks)
        walls_s.append(time.perf_counter() - began_s)
        todo = [turn for turn in todo[1:] if "failed" not in run or turn[1] != contender]
        say(f"  {line(run)}  in {human_duration(walls_s[-1])}")
        yield {"label": contender.label, "round": number, "wall_s": walls_s[-1], **run}


def line(run: Run) -> str:
    """A finished run as a line of progress."""
    if "failed" in run:
        return f"failed: {run['failed']}"
    speed, loss = f"{run['tokens_per_s']:,.0f} tok/s", f"loss {human_number(run['loss'], 5)}"
    return f"{speed}  {loss}  host {human(run['host_peak_bytes'])}"
