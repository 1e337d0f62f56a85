"""What a benchmark leaves: the summary of its runs, one table, and a folder under ``benchmarks/records``.

Ratios are taken between runs of the same round, which were close in time, and then the median over the rounds. So they
hold on a machine whose speed drifts, where a ratio of two medians would not.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import REPO, Run
from benchmarks.harness.work import PLAIN, Work
from strategies.core.sizes import human
from strategies.report.table import table as aligned
from trainer.errors import ConfigError
from trainer.run.metrics import human_number

UNKNOWN = "n/a"
QUIET = 0.05  # the table says so if other processes used more of the cores than this while a run was measured
HEAD = ("contender", "tokens/s", "min to max", "of plain", "min to max", "device peak", "host peak", "fwd + bwd peak",
        "final loss")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of several runs."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender over all rounds; None where nothing is known. Peaks are the highest of any run."""

    label: str
    tokens_per_s: Spread | None = None
    of_plain: Spread | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    loss: float | None = None
    failed: str | None = None
    notes: tuple[str, ...] = ()
    others_share: float = 0.0
    backward_bytes: int | None = None


def spread(values: Iterable[float]) -> Spread | None:
    """The spread of ``values``, None if there are none."""
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def summary(runs: Sequence[Run]) -> list[Row]:
    """One row per contender, the fastest first; those that never succeeded come last."""
    plain = {run["round"]: run["tokens_per_s"] for run in runs if run["label"] == PLAIN and "failed" not in run}
    labels = dict.fromkeys(run["label"] for run in runs)
    rows = [_row(label, [run for run in runs if run["label"] == label], plain) for label in labels]
    return sorted(rows, key=lambda row: -row.tokens_per_s.median if row.tokens_per_s else 0.0)


def _row(label: str, runs: Sequence[Run], plain: Mapping[int, float]) -> Row:
    good = [run for run in runs if "failed" not in run]
    ratios = [run["tokens_per_s"] / plain[run["round"]] for run in good if run["round"] in plain]
    device = [run["device_peak_bytes"] for run in good if run.get("device_peak_bytes") is not None]
    return Row(
        label,
        spread(run["tokens_per_s"] for run in good),
        spread(ratios),
        max(device, default=None),
        max((run["host_peak_bytes"] for run in good), default=None),
        good[-1]["loss"] if good else None,
        next((run["failed"] for run in runs if "failed" in run), None),
        tuple(good[-1]["notes"]) if good else (),
        max((run["others_share"] for run in good), default=0.0),
        max((run["backward_peak_bytes"] for run in good if "backward_peak_bytes" in run), default=None),
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown that is also aligned, then what is to be known of single rows."""
    text = aligned(HEAD, map(_cells, rows), HEAD[1:], markdown=True)
    remarks = [f"- {row.label}: {note}" for row in rows for note in row.notes]
    remarks += [f"- {row.label} failed: {row.failed}" for row in rows if row.failed is not None]
    disturbed = [f"{row.label} {row.others_share:.0%}" for row in rows if row.others_share > QUIET]
    if disturbed:
        remarks.append(f"- not alone: other processes used the cores while it ran, at worst: {', '.join(disturbed)}")
    return "\n".join([*text, "", *remarks] if remarks else text)


def _cells(row: Row) -> tuple[str, ...]:
    if row.tokens_per_s is None:
        return (row.label, "failed", *[""] * (len(HEAD) - 2))
    speed, ratio = row.tokens_per_s, row.of_plain
    peaks = (row.device_bytes, row.host_bytes, row.backward_bytes)
    return (
        row.label,
        f"{speed.median:,.0f}",
        f"{speed.least:,.0f} to {speed.most:,.0f}",
        f"{ratio.median:.3f}" if ratio else UNKNOWN,
        f"{ratio.least:.3f} to {ratio.most:.3f}" if ratio else UNKNOWN,
        *(UNKNOWN if peak is None else human(peak) for peak in peaks),
        human_number(row.loss, 6) if row.loss is not None else UNKNOWN,
    )


# --- the folder --------------------------------------------------------------------------------------------------


def machine_name(hardware: Mapping[str, Any]) -> str:
    """The machine in a folder's name: ``h100-80gb-hbm3``, ``2-core-cpu``."""
    if hardware["device_kind"] == "cpu":
        return f"{hardware['usable_cores']}-core-cpu"
    return re.sub(r"[^a-z0-9]+", "-", hardware["name"].lower().removeprefix("nvidia ")).strip("-")


def new_folder(parent: Path, theme: str, hardware: Mapping[str, Any]) -> Path:
    """Make ``<date>_<theme>_<machine>``, numbered if it exists, with a folder for logs in it.

    Raises:
        ConfigError: if it cannot be made.
    """
    name = f"{time.strftime('%Y-%m-%d')}_{theme}_{machine_name(hardware)}"
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}_{number}"
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {parent}: cannot make a folder there ({error.strerror})") from None
    return folder


def commit() -> str:
    """The commit of this checkout, with ``+`` if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def conditions(work: Work, rounds: int, surroundings: Mapping[str, Any]) -> str:
    """The line above a table: the work, the machine and the versions that the figures belong to."""
    shape, versions, hardware = work.shape, surroundings["versions"], surroundings["hardware"]
    ranks = f" and rank, on {work.ranks} ranks" if work.ranks > 1 else ""
    recompute = ", blocks recomputed" if work.recompute else ""
    recompute += f", {work.attention} attention" + (f" with dropout {work.dropout}" if work.dropout else "")
    return (
        f"{work.model}: {shape.num_params / 1e6:,.1f} M parameters in {shape.layers} blocks, {work.dtype}{recompute}; "
        f"{work.tokens:,} tokens per optimizer step{ranks} ({work.rows} x {work.length} x {work.accumulation}); "
        f"{work.steps} steps after {work.warmup}, {rounds} rounds; {hardware['name']}, {hardware['usable_cores']} "
        f"cores; torch {versions['torch']}, deepspeed {versions['deepspeed']}; commit {commit()}"
    )


def write(folder: Path, command: str, work: Work, rounds: int, surroundings: Any, runs: Sequence[Run]) -> str:
    """Write ``record.json`` and ``table.md`` for the runs so far. Returns the table with its conditions."""
    rows = summary(runs)
    text = f"{conditions(work, rounds, surroundings)}\n\n{table(rows)}\n"
    record = {
        "command": command,
        "commit": commit(),
        "work": {**asdict(work), "tokens_per_step": work.tokens, "shape": asdict(work.shape)},
        "rounds": rounds,
        **surroundings,
        "summary": [asdict(row) for row in rows],
        "runs": list(runs),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "table.md").write_text(text)
    return text
