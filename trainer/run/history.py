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
from typing import Any

from PIL import Image, ImageDraw

from deepstow.strategies.core.sizes import human, human_number
from deepstow.trainer.config import yaml_file
from deepstow.trainer.errors import DataError, printable
from deepstow.trainer.planning.picture import FONT, GRID, INK, axis
from deepstow.trainer.run import foreign

WIDTH, HEIGHT, LEFT, MARGIN = 1200, 700, 90, 30
COLOURS = ((60, 100, 150), (196, 120, 40))
LEVELS = " ▁▂▃▄▅▆▇█"
IN_NATS = ("sft", "pretrain")  # tasks whose loss is the cross-entropy of a token
NOT_FINITE = ("nan", "inf", "-inf")  # as a run writes what JSON has no number for
LAST_STEP = 1 << 53
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
        found = list(records(foreign.lines_of(folder / "metrics.jsonl")))
        text = foreign.text_of(folder / "config.yaml")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no run's folder, with config.yaml and metrics.jsonl: {error}") from None
    config, document = yaml_file.parse(text, str(folder / "config.yaml"))
    if document.problems:
        raise DataError(f"{folder}: no run's folder: {document.problems[0]}")
    return History(folder, config if isinstance(config, dict) else {}, found)


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
    loss, evaluated, mfu = run.last("loss"), run.last("eval_loss"), run.last("mfu")
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
    ours, theirs = dict(first.curve("loss")), dict(second.curve("loss"))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return "no step was logged by both"
    parts = next((step for step in common if ours[step] != theirs[step]), None)
    if parts is None:
        return f"the same losses to the last digit, at all {len(common)} steps that both have logged"
    return f"losses differ from step {parts} on: {ours[parts]} and {theirs[parts]}"


def spark(curve: Curve, width: int = 60) -> str:
    """A curve as one line of blocks, the mean of each part of it; the highest is a full block, a gap is not finite."""
    size = -(-len(curve) // width)
    means = [sum(value for _, value in curve[at : at + size]) / size for at in range(0, len(curve) - size + 1, size)]
    known = [mean for mean in means if isfinite(mean)]
    low, high = min(known, default=0), max(known, default=0)
    return "".join(LEVELS[1 + int(7 * _share(m, low, high))] if isfinite(m) else LEVELS[0] for m in means)


def _share(value: float, low: float, high: float) -> float:
    """Where ``value`` is between two others, from 0 to 1; halves, for their difference may be no number any more."""
    return (value / 2 - low / 2) / (high / 2 - low / 2 or 1)


def draw(runs: Sequence[History], path: Path) -> None:
    """Write losses, and evaluation losses as points, over steps. Raises OSError or ValueError: it cannot be written."""
    curves = [(run.curve("loss"), run.curve("eval_loss")) for run in runs]
    points = [(step, value) for pair in curves for curve in pair for step, value in curve if isfinite(value)]
    most = max((step for step, _ in points), default=1) or 1
    low, high = min((value for _, value in points), default=0), max((value for _, value in points), default=1)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    counted = all(str(run.config.get("task", "sft")) in IN_NATS for run in runs)
    pen.text((MARGIN, 10 + 20 * len(runs)), f"loss{' (nats per token)' * counted}", INK, FONT)
    pen.text((WIDTH - MARGIN - FONT.getlength("optimizer steps"), HEIGHT - MARGIN - 4), "optimizer steps", INK, FONT)

    def at(step: float, value: float) -> tuple[float, float]:
        height = (HEIGHT - 5 * MARGIN) * _share(value, low, high)
        return (LEFT + (WIDTH - LEFT - MARGIN) * step / most, HEIGHT - 2 * MARGIN - height)

    for step in axis(most):
        pen.line((*at(step, low), *at(step, high)), GRID)
        pen.text((at(step, low)[0] - 10, HEIGHT - 2 * MARGIN + 6), f"{step:.4g}", INK, FONT)
    for part in range(6):
        value = low * (1 - part / 5) + high * (part / 5)
        pen.line((*at(0, value), *at(most, value)), GRID)
        pen.text((MARGIN, at(0, value)[1] - 9), human_number(value, 4), INK, FONT)
    for index, (run, (losses, evaluated)) in enumerate(zip(runs, curves, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        pen.text((LEFT, 8 + 20 * index), printable(f"{run.folder}: loss, and evaluation loss as points"), colour, FONT)
        pen.line([at(*point) for point in losses if isfinite(point[1])], colour, 2)
        for x, y in (at(*point) for point in evaluated if isfinite(point[1])):
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=colour)
    image.save(path)
