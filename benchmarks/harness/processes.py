"""The processes of a benchmark: rounds, progress, failures.

Subjects take turns (A B C, A B C, ...), each run in a fresh process, so that a machine that grows slower does so for
all alike, and peak memory is the run's own. A subject that fails is a row; it is not started again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Contender, Work
from strategies.core.sizes import human
from trainer.run.metrics import human_duration, human_number

REPO = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 1800

Run = dict[str, Any]  # what one run measured (``child.py``), or its reason under "failed"; a record holds it whole


def surroundings() -> dict[str, Any]:
    """Hardware and versions. Asked of a process of its own, so that this one holds nothing on a device."""
    with tempfile.TemporaryFile("w+") as log:
        told = child({}, log)
        log.seek(0)
        if "failed" in told:
            raise RuntimeError(f"this machine cannot be asked what it is: {told['failed']}\n{log.read()[-4000:]}")
    return told


def child(request: dict[str, Any], log: Any) -> Run:
    """What a fresh process answers to the request; everything it prints goes to ``log``."""
    with tempfile.TemporaryDirectory(prefix="deepstow-bench-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.harness.child"]
        text = json.dumps({**request, "out": str(out)})
        try:
            done = subprocess.run(
                command, input=text, text=True, cwd=REPO, stdout=log, stderr=log, timeout=RUN_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished after {human_duration(RUN_LIMIT_S)}"}
        if out.exists():
            answer: Run = json.loads(out.read_text())
            return answer
    if done.returncode == -9:
        return {"failed": "killed by signal 9, most likely for want of memory"}
    return {"failed": f"ended with code {done.returncode} without a result; see its log"}


def measure(
    work: Work, subjects: Sequence[Contender], rounds: int, logs: Path, say: Callable[[str], None] = print
) -> Iterator[Run]:
    """Every run as it ends, in the order of the rounds; ``label``, ``round`` and ``wall_s`` are in it."""
    out: set[str] = set()
    walls: list[tuple[str, float]] = []
    for number in range(1, rounds + 1):
        for subject in subjects:
            if subject.label in out:
                continue
            left = seconds_left(walls, [each.label for each in subjects if each.label not in out], rounds)
            remaining = f", about {human_duration(left)} left" if left is not None else ""
            say(f"round {number} of {rounds}: {subject.label}{remaining}")
            began_s = time.perf_counter()
            with (logs / f"{subject.label.replace(' ', '-')}-{number}.log").open("w") as log:
                run = child({"work": asdict(work), "subject": asdict(subject)}, log)
            wall_s = time.perf_counter() - began_s
            walls.append((subject.label, wall_s))
            if "failed" in run:
                out.add(subject.label)
            say(f"  {line(run)}  in {human_duration(wall_s)}")
            yield {"label": subject.label, "round": number, "wall_s": wall_s, **run}


def seconds_left(walls: Sequence[tuple[str, float]], labels: Sequence[str], rounds: int) -> float | None:
    """Each subject's runs to come, at the mean length of its own so far, or of everybody's; None before the first."""
    if not walls:
        return None
    mean = sum(wall for _, wall in walls) / len(walls)
    left = 0.0
    for label in labels:
        own = [wall for name, wall in walls if name == label]
        left += (rounds - len(own)) * (sum(own) / len(own) if own else mean)
    return left


def line(run: Run) -> str:
    """A finished run, for the progress."""
    if "failed" in run:
        return f"failed: {run['failed']}"
    speed, loss = f"{run['tokens_per_s']:,.0f} tok/s", f"loss {human_number(run['loss'], 5)}"
    return f"{speed}  {loss}  host {human(run['host_peak_bytes'])}"
