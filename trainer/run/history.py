"""What runs wrote into ``metrics.jsonl``, read back: curves of a run, and two runs beside each other.

Numbers only, without torch; ``deepstow watch`` shows one run while it trains, ``deepstow compare`` two that are over
or not. A line that is being written just now is left out, and so is what no run writes: the folder may be anybody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.sizes import human, human_number
from deepstow.trainer.config import yaml_file
from deepstow.trainer.errors import DataError
from deepstow.trainer.planning import picture
from deepstow.trainer.run import foreign

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#3c6496", "#c47828")
LEVELS = " ▁▂▃▄▅▆▇█"
IN_NATS = ("sft", "pretrain")  # tasks whose loss is the cross-entropy of a token
NOT_FINITE = ("nan", "inf", "-inf")  # as a run writes what JSON has no number for
LAST_STEP = 1 << 53
LARGEST = 1e300  # value that is drawn: differences of larger ones are no numbers any more
EPOCHS, ROUNDING = 3, 0.05  # Hugging Face's number of epochs; of a step, by which an epoch's digits may be off
Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class History:
    """One run: its folder, its config as a tree, and its records."""

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]

    def curve(self, key: str) -> Curve:
        """Steps with the values of ``key``."""
        values = ((record["step"], number(record.get(key))) for record in self.records)
        return [(step, value) for step, value in values if value is not None]

    def last(self, key: str) -> float | None:
        """The newest value of ``key``."""
        return next((value for _, value in reversed(self.curve(key))), None)

    def total(self) -> int | None:
        """How many steps the run will make: by its config, or by how far a step has come in an epoch. None: unknown."""
        training = self.config.get("training")
        training = training if isinstance(training, dict) else {}
        if isinstance(steps := training.get("max_steps"), int) and steps > 0:
            return steps
        epochs, passed = number(training.get("num_train_epochs", EPOCHS)), self.curve("epoch")
        if not epochs or not passed or not 0 < passed[-1][1] < inf or not epochs < inf:
            return None
        return ceil(epochs * passed[-1][0] / passed[-1][1] - ROUNDING)


def number(value: object) -> float | None:
    """``value`` of a record as a number; None: it is none."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in NOT_FINITE):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None


def read(folder: Path) -> History:
    """The history in ``folder``. Raise DataError if no run has written there."""
    try:
        logged = list(records(foreign.lines_of(folder / "metrics.jsonl")))
        text = foreign.text_of(folder / "config.yaml")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no run's folder, with config.yaml and metrics.jsonl: {error}") from None
    config, document = yaml_file.parse(text, str(folder / "config.yaml"))
    if document.problems:
        raise DataError(f"{folder}: no run's folder: {document.problems[0]}")
    return History(folder, config if isinstance(config, dict) else {}, logged)


def records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The records in lines of ``metrics.jsonl``; one that a kill has cut is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] <= LAST_STEP:
            yield record


def summary(run: History) -> list[str]:
    """Cells of a run in a table: see ``SUMMARY``."""
    losses, speeds = run.curve("loss"), [value for _, value in run.curve("tokens_per_s")]
    loss = run.last("loss")
    evaluated = run.last("eval_loss")
    mfu = run.last("mfu")
    peaks = [max((value for _, value in run.curve(f"{home}_peak_bytes")), default=None) for home in ("device", "host")]
    return [
        str(run.folder),
        str(losses[-1][0] if losses else 0),
        "-" if loss is None else human_number(loss, 5),
        "-" if evaluated is None else human_number(evaluated, 5),
        f"{median(speeds):,.0f}" if speeds else "-",
        "-" if mfu is None else f"{mfu:.1%}",
        *("-" if peak is None else human(peak) for peak in peaks),
    ]


SUMMARY = ("run", "steps", "loss", "eval loss", "tokens/s", "MFU", "device", "host")


def agreement(first: History, second: History) -> str:
    """Up to which step two runs logged the same losses, to the last digit."""
    first_losses, second_losses = dict(first.curve("loss")), dict(second.curve("loss"))
    common = sorted(first_losses.keys() & second_losses.keys())
    if not common:
        return "no step was logged by both"
    parts = next((step for step in common if first_losses[step] != second_losses[step]), None)
    if parts is None:
        return f"the same losses to the last digit, at all {len(common)} steps that both have logged"
    return f"losses differ from step {parts} on: {first_losses[parts]} and {second_losses[parts]}"


def spark(curve: Curve, width: int = 60) -> str:
    """A curve as one line of blocks, the mean of each part of it; the highest is a full block, a gap is not finite."""
    size = -(-len(curve) // width)
    means = [sum(value for _, value in curve[at : at + size]) / size for at in range(0, len(curve) - size + 1, size)]
    finite = [mean for mean in means if isfinite(mean)]
    low, high = min(finite, default=0), max(finite, default=0)
    return "".join(LEVELS[1 + int(7 * _share(m, low, high))] if isfinite(m) else LEVELS[0] for m in means)


def _share(value: float, low: float, high: float) -> float:
    """Where ``value`` is between two others, from 0 to 1; halves, for their difference may be no number any more."""
    return (value / 2 - low / 2) / (high / 2 - low / 2 or 1)


def draw(runs: Sequence[History]) -> Figure:
    """Losses, and evaluation losses as points, over steps."""
    figure = picture.canvas(7.0, 12.0)
    axes = figure.subplots()
    for run, colour in zip(runs, COLOURS, strict=False):
        for key, style in (("loss", "-"), ("eval_loss", "o")):
            if points := [point for point in run.curve(key) if abs(point[1]) < LARGEST]:
                name = picture.plain(f"{run.folder}: {key.replace('_', ' ')}")
                axes.plot(*zip(*points, strict=True), style, color=colour, label=name)
    counted = all(str(run.config.get("task", "sft")) in IN_NATS for run in runs)
    axes.set_ylabel(f"loss{' (nats per token)' * counted}")
    axes.set_xlabel("optimizer steps")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.4)
    axes.legend()
    return figure
