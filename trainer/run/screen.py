"""What a run shows on one screen, read from its records and its plan: ``deepstow watch`` in any terminal, and the run
itself in its own (``live.py``). Without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from deepstow.strategies.core.sizes import human, human_duration, human_number
from deepstow.trainer.distributed import exit_file
from deepstow.trainer.errors import MEANINGS, printable
from deepstow.trainer.run import foreign, history

WIDTH = 97  # columns with which a curve has all its 60 points
BESIDE = WIDTH - 60  # columns beside a curve, for its name and its newest value


def lines(run: history.History, width: int = WIDTH, step: int | None = None, total: int | None = None) -> Iterator[str]:
    """The lines of the screen; what the run has not written is left out. ``step``: not set means that of the newest
    record; ``total``: as many as the run will make, by its config. What others wrote is ``printable`` in them.
    """
    return map(printable, _lines(run, width, step, total or run.total()))


def _lines(run: history.History, width: int, step: int | None, total: int | None) -> Iterator[str]:
    losses = run.curve("loss")
    step = max((record["step"] for record in run.records), default=0) if step is None else step
    left = run.last("eta_s")
    code, points = _code_of(run.folder), max(8, min(WIDTH, width) - BESIDE)
    if code is not None:
        state = f"  {MEANINGS.get(code, f'ended with {code}')}"
    elif run.last("train_loss") is not None:
        state = "  training is over"  # and the export is not there yet
    else:
        state = f"  {human_duration(left)} left" if left else ""
    of = f" of {total:,} ({step / total:.0%})" if total is not None and total >= step else ""
    yield f"{run.folder}  step {step:,}{of}{state}"
    for name, curve in (("loss", losses), ("eval loss", run.curve("eval_loss"))):
        if curve:
            first, last = (human_number(value, 4) for value in (curve[0][1], curve[-1][1]))
            yield f"  {name:<10} {history.spark(curve, points)}  {first} -> {last}"
    for name, key in (("tokens/s", "tokens_per_s"), ("MFU", "mfu"), ("grad norm", "grad_norm")):
        if curve := run.curve(key):
            value = f"{curve[-1][1]:.1%}" if key == "mfu" else human_number(curve[-1][1], 4)
            yield f"  {name:<10} {history.spark(curve, points)}  {value}"
    for home in ("device", "host"):
        if (peak := run.last(f"{home}_peak_bytes")) is not None:
            yield f"  {home:<10} {human(peak)} at its peak"
    yield from _measured(run.folder / "plan.json")


def _code_of(folder: Path) -> int | None:
    try:
        return exit_file.code_of(foreign.text_of(folder / exit_file.NAME))
    except (OSError, ValueError):
        return None


def _measured(file: Path) -> Iterator[str]:
    """Bytes over the link in step 2, as the run has measured them, and as its plan foretold them."""
    try:
        content = json.loads(foreign.text_of(file))
    except (OSError, ValueError, RecursionError):
        return
    rows = content.get("measured") if isinstance(content, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and str(row.get("owner")).startswith("link"):
            measured, predicted = (history.number(row.get(name)) for name in ("measured", "predicted"))
            if measured is not None and predicted is not None:
                yield f"  {row['owner']}: {human(measured)} per step, {human(predicted)} foretold"
