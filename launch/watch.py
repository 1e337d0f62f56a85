"""A run on one screen while it trains: loss, speed, MFU, memory, what the link does. Reads the run's folder alone.

From any terminal that sees the folder. It ends with the run; Ctrl-C ends the watching, not the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deepstow.launch import cli
from deepstow.strategies.core.sizes import human, human_duration, human_number
from deepstow.trainer.distributed import exit_file
from deepstow.trainer.errors import MEANINGS, printable
from deepstow.trainer.run import foreign, history

EVERY_S = 1.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(cli.Parser(), "watch", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--once", action="store_true", help="show it once")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the run until it ends; returns the exit code."""
    arguments, console = parse(argv), Console()
    return cli.answered(lambda: _watch(arguments.run, console, once=arguments.once or not console.is_terminal))


def _watch(folder: Path, console: Console, *, once: bool) -> None:
    run = history.read(folder)
    if once:
        console.print(shown(run, console.width), soft_wrap=True)
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(shown(run, console.width), refresh=True)
            if run.last("train_loss") is not None:
                return
            time.sleep(EVERY_S)
            run = history.read(folder)


BESIDE = 37  # columns beside a curve, for its name and its newest value
POINTS = 60  # of a curve, at most


def shown(run: history.History, width: int) -> Group:
    """The run on ``width`` columns: its step, its curves, its memory, its link. What it has not written is left out."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True, style="cyan")
    rows.add_column(no_wrap=True)
    for name, curve, value in _rows(run, min(POINTS, max(8, width - BESIDE))):
        rows.add_row(f"  {name}", curve, value)
    return Group(_line(_heading(run), "bold"), rows, *map(_line, _measured(run.folder / "plan.json")))


def _line(text: str, style: str = "") -> Text:
    """What others wrote is ``printable`` in it, and no markup."""
    return Text(printable(text), style=style, no_wrap=True)


def _heading(run: history.History) -> str:
    step, total = max((record["step"] for record in run.records), default=0), run.total()
    of = f" of {total:,} ({step / total:.0%})" if total is not None and total >= step else ""
    return f"{run.folder}  step {step:,}{of}{_state(run)}"


def _state(run: history.History) -> str:
    """How the run has ended, or how long it still takes."""
    code, eta = _code_of(run.folder), run.last("eta_s")
    if code is not None:
        return f"  {MEANINGS.get(code, f'ended with {code}')}"
    if run.last("train_loss") is not None:
        return "  training is over"  # and the export is not there yet
    return f"  {human_duration(eta)} left" if eta else ""


def _rows(run: history.History, points: int) -> Iterator[tuple[str, str, str]]:
    """Name, curve and newest value."""
    for name, key in (("loss", "loss"), ("eval loss", "eval_loss")):
        if curve := run.curve(key):
            first, last = (human_number(value, 4) for value in (curve[0][1], curve[-1][1]))
            yield name, history.spark(curve, points), f"{first} -> {last}"
    for name, key in (("tokens/s", "tokens_per_s"), ("MFU", "mfu"), ("grad norm", "grad_norm")):
        if curve := run.curve(key):
            value = f"{curve[-1][1]:.1%}" if key == "mfu" else human_number(curve[-1][1], 4)
            yield name, history.spark(curve, points), value
    for tier in ("device", "host"):
        if (peak := run.last(f"{tier}_peak_bytes")) is not None:
            yield tier, "", f"{human(peak)} at its peak"


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


if __name__ == "__main__":
    sys.exit(main())
