"""Runs that something happens to while they train: a signal, a stop, a death; and the run that nobody disturbed."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.commands import MODEL, Job, Server, digest, metrics, write_config, write_text_data

STEPS = 42  # of 4 per epoch on one rank, so the last epoch is not whole


def config_in(
    folder: Path, strategies: dict[str, Any] | None = None, model: dict[str, Any] = MODEL, **training: Any
) -> Path:
    """Dropout, shuffling over several epochs, a rate that does not end at 0; a checkpoint when one is asked for."""
    write_text_data(folder / "few.jsonl", num_rows=15)
    usual = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": 10 * STEPS, "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "learning_rate": 1e-3,
        "resume_from_checkpoint": "auto",
    }  # fmt: skip
    data = {"path": str(folder / "few.jsonl")}
    given = {"model": {"config": model}, "strategies": strategies or {}}
    return write_config(folder, data=data, training={**usual, **training}, **given)


def start(server: Server, num_ranks: int, config: Path, *overrides: str) -> Job:
    return server.start(num_ranks, ["--config", str(config), *overrides], config.parent)


def until(true: Callable[[], object], job: Job, what: str, timeout_s: float = 240.0) -> None:
    """Wait until something is true of a job that is running."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert job.poll() is None, f"over before {what}\n{job.wait().text}"
        assert time.monotonic() < deadline_s, f"not {what} after {timeout_s} s"
        time.sleep(0.005)


def step_of(folder: Path) -> int:
    """The newest step in the run's metrics; 0 before the first."""
    try:
        return max((record["step"] for record in metrics(folder) if "loss" in record), default=0)
    except (FileNotFoundError, ValueError):
        return 0


def at_step(job: Job, config: Path, step: int, timeout_s: float = 60.0) -> None:
    until(lambda: step_of(config.parent / "run") >= step, job, f"at step {step}", timeout_s)


def ranks_of(job: Job) -> list[int]:
    """Process ids of the ranks, in their order: the children of the leader of the job's session."""
    return sorted(child.pid for child in psutil.Process(job.pid).children())


def checkpoints(config: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in (config.parent / "run").glob("checkpoint-*"))


def ended(config: Path) -> tuple[int, int | None]:
    """The code and the step in what the run has left for schedulers."""
    found = json.loads((config.parent / "run" / "exit.json").read_text())
    return found["code"], found["step"]


def same_end(config: Path, whole: Path) -> None:
    """The same bits, and every step once in the metrics."""
    assert digest(config.parent / "run" / "export") == digest(whole.parent / "run" / "export")
    assert [record["step"] for record in metrics(config.parent / "run") if "loss" in record] == list(
        range(1, STEPS + 1)
    )
