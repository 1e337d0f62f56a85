"""What a benchmark leaves: one table, and a folder under ``benchmarks/records`` with every run's figures.

Ratios are taken between runs of the same round, which were close in time, and then the median over the rounds. So they
hold on a machine whose speed drifts, where a ratio of two medians would not.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.benchmarks.harness import processes
from deepstow.benchmarks.harness.processes import REPO, Run
from deepstow.benchmarks.harness.work import OURS, PLAIN, Contender, Work
from deepstow.strategies.core.sizes import human, human_number
from deepstow.strategies.report.table import table as aligned
from deepstow.trainer.errors import ConfigError, ExitCode
from deepstow.trainer.machine.profiles import COMMAND
from deepstow.trainer.planning import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = "n/a"
QUIET = 0.05  # the table says so if other processes used more of the cores than this while a run was measured
HEAD = ("contender", "tokens/s", "min to max", "of plain", "min to max", "device peak", "host peak", "fwd + bwd peak",
        "final loss")  # fmt: skip
PEAKS = ("device_peak_bytes", "host_peak_bytes", "backward_peak_bytes")
Say = Callable[[str], None]


def answer(
    theme: str, work: Work, contenders: Sequence[Contender], rounds: int, out: Path, command: str, say: Say
) -> ExitCode:
    """Let every contender do the same work in every round, and keep the record in a new folder under ``out``, written
    after each run: command, commit, hardware, versions, rates, figures. ConfigError if no folder can be made in
    ``out``, or the rates that plans need are not measured.
    """
    around = {"command": command, "commit": commit(), **processes.surroundings()}
    refuse_unmeasured(around, contenders)
    folder = new_folder(out, theme, around["hardware"])
    above = conditions(work, rounds, around)
    runs = list[Run]()
    code = ExitCode.FINISHED
    text = ""
    say(f"{len(contenders)} contenders; {above}")
    about_work = {**asdict(work), "tokens_per_step": work.tokens, "shape": asdict(work.shape)}
    try:
        for run in processes.measure(work, contenders, rounds, folder / "logs", say):
            runs.append(run)
            text = f"{above}\n\n{table(runs)}\n"
            told = around | {"work": about_work, "rounds": rounds, "runs": runs}
            (folder / "record.json").write_text(json.dumps(told, indent=1) + "\n")
            (folder / "table.md").write_text(text)
    except KeyboardInterrupt:
        say("interrupted; the record has what had ended")
        code = ExitCode.INTERRUPTED
    shown = folder / "table.png"
    if why := picture.cannot(shown):
        say(f"{shown}: {why}")
    elif runs:
        picture.save(draw(runs), shown)
    say(f"\n{text}\nrecord: {folder}")
    return code


def refuse_unmeasured(around: Mapping[str, Any], contenders: Sequence[Contender]) -> None:
    """Raise ConfigError for a contender of ours on a machine, as ``surroundings`` says, whose rates are not measured:
    its plan would be the first that fits, or one for another machine.
    """
    if around["rates"] or all(contender.maker != OURS for contender in contenders):
        return
    why = around["rates_ignored"].partition("; to measure again")[0] or "the rates of this machine are not measured"
    raise ConfigError(f"{why}, and plans of ours are made from them; measure them first: {COMMAND}")


def conditions(work: Work, rounds: int, around: Mapping[str, Any]) -> str:
    """The line above a table: the work, the machine and the versions that the figures belong to."""
    shape = work.shape
    versions = around["versions"]
    hardware = around["hardware"]
    ranks = f" and rank, on {work.ranks} ranks" if work.ranks > 1 else ""
    recompute = ", blocks recomputed" if work.recompute else ""
    recompute += f", {work.attention} attention" + (f" with dropout {work.dropout}" if work.dropout else "")
    recompute += f", rows of {work.documents} documents" if work.documents > 1 else ""
    return (
        f"{work.model}: {shape.num_params / 1e6:,.1f} M parameters in {shape.layers} blocks, {work.dtype}{recompute}; "
        f"{work.tokens:,} tokens per optimizer step{ranks} ({work.rows} x {work.length} x {work.accumulation}); "
        f"{work.steps} steps after {work.warmup}, {rounds} rounds; {hardware['name']}, {hardware['usable_cores']} "
        f"cores; torch {versions['torch']}, deepspeed {versions['deepspeed']}; commit {around['commit']}"
    )


def table(runs: Sequence[Run]) -> str:
    """One row per contender, the fastest first and those that never succeeded last; then what is to be known of single
    ones. Peaks are the highest of any run."""
    good: dict[str, list[Run]] = {run["label"]: [] for run in runs}
    for run in runs:
        good[run["label"]] += [] if "failed" in run else [run]
    plain = {run["round"]: run["tokens_per_s"] for run in good.get(PLAIN, ())}
    rows = sorted(good.items(), key=lambda row: -statistics.median([run["tokens_per_s"] for run in row[1]] or [0.0]))
    text = aligned(HEAD, [_cells(label, group, plain) for label, group in rows], HEAD[1:], markdown=True)
    remarks = [f"- {label}: {note}" for label, group in rows if group for note in group[-1]["notes"]]
    remarks += [f"- {run['label']} failed: {run['failed']}" for run in runs if "failed" in run]
    later = {run["label"]: run["compiled_later"] for _, group in rows for run in group if run.get("compiled_later")}
    remarks += [f"- {label}: {count} graphs were compiled while it was measured" for label, count in later.items()]
    shares = {label: max(run["others_share"] for run in group) for label, group in rows if group}
    if disturbed := [f"{label} {share:.0%}" for label, share in shares.items() if share > QUIET]:
        remarks.append(f"- not alone: other processes used the cores while it ran, at worst: {', '.join(disturbed)}")
    return "\n".join([*text, "", *remarks] if remarks else text)


def draw(runs: Sequence[Run]) -> Figure:
    """Tokens per second of plain of each contender, as a bar to the median and a line from least to most."""
    plain = {run["round"]: run["tokens_per_s"] for run in runs if run["label"] == PLAIN and "failed" not in run}
    ratios_of: dict[str, list[float]] = {}
    for run in runs:
        if "failed" not in run and run["round"] in plain:
            ratios_of.setdefault(run["label"], []).append(run["tokens_per_s"] / plain[run["round"]])
    figure = picture.canvas(1.2 + picture.ROW * len(ratios_of), 10.0)
    axes = figure.subplots()
    for label, ratios in ratios_of.items():
        middle = statistics.median(ratios)
        spread = [[middle - min(ratios)], [max(ratios) - middle]]
        bar = axes.barh([label], middle, xerr=spread, color=picture.COLOURS["forward"])
        axes.bar_label(bar, [f"{middle:.2f}"], label_type="center", color="white")
    axes.axvline(1.0, color=picture.RED)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, relative to plain in the same round (median, least and most)")
    return figure


def _cells(label: str, runs: Sequence[Run], plain: Mapping[int, float]) -> tuple[str, ...]:
    if not runs:
        return (label, "failed", *[""] * (len(HEAD) - 2))
    speeds = [run["tokens_per_s"] for run in runs]
    ratios = [run["tokens_per_s"] / plain[run["round"]] for run in runs if run["round"] in plain]
    peaks = [max((run[name] for run in runs if run.get(name) is not None), default=None) for name in PEAKS]
    return (
        label,
        *_spread(speeds, ",.0f"),
        *_spread(ratios, ".3f"),
        *(UNKNOWN if peak is None else human(peak) for peak in peaks),
        human_number(runs[-1]["loss"], 6),
    )


def _spread(values: Sequence[float], form: str) -> tuple[str, str]:
    if not values:
        return UNKNOWN, UNKNOWN
    return f"{statistics.median(values):{form}}", f"{min(values):{form}} to {max(values):{form}}"


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
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
