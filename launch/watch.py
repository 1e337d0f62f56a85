"""A run on one screen while it trains: loss, speed, MFU, memory, what the link does. Reads the run's folder alone.

From any terminal that sees the folder. It ends with the run; Ctrl-C ends the watching, not the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs where the package is not installed, too

from launch import cli
from strategies.core.sizes import human, human_duration, human_number
from trainer.run import history

EVERY_S = 1.0
CLEAR = "\x1b[H\x1b[J"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(argparse.ArgumentParser(), "watch", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--once", action="store_true", help="show it once")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the run until it ends; returns the exit code."""
    given = parse(argv)
    return cli.answered(lambda: _watch(given.run, once=given.once or not sys.stdout.isatty()))


def _watch(folder: Path, *, once: bool) -> None:
    try:
        while True:
            run = history.read(folder)
            print("" if once else CLEAR, *screen(run), sep="\n", flush=True)
            if once or run.last("train_loss") is not None:
                return
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return


def screen(run: history.History) -> Iterator[str]:
    """The lines of the screen; what the run has not written is left out."""
    losses, step = run.curve("loss"), max((record["step"] for record in run.records), default=0)
    left = run.last("eta_s")
    over = run.last("train_loss") is not None
    yield f"{run.folder}  step {step}" + ("  finished" if over else f"  {human_duration(left)} left" if left else "")
    for name, curve in (("loss", losses), ("eval loss", run.curve("eval_loss"))):
        if curve:
            first, last = (human_number(value, 4) for value in (curve[0][1], curve[-1][1]))
            yield f"  {name:<10} {history.spark(curve)}  {first} -> {last}"
    for name, key in (("tokens/s", "tokens_per_s"), ("MFU", "mfu"), ("grad norm", "grad_norm")):
        if curve := run.curve(key):
            value = f"{curve[-1][1]:.1%}" if key == "mfu" else human_number(curve[-1][1], 4)
            yield f"  {name:<10} {history.spark(curve)}  {value}"
    for home in ("device", "host"):
        if (peak := run.last(f"{home}_peak_bytes")) is not None:
            yield f"  {home:<10} {human(peak)} at its peak"
    yield from _measured(run.folder / "plan.json")


def _measured(file: Path) -> Iterator[str]:
    """Bytes over the link in step 2, as the run has measured them, and as its plan foretold them."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8")).get("measured") or ()
    except (OSError, ValueError):
        return
    for row in rows:
        if row["owner"].startswith("link"):
            yield f"  {row['owner']}: {human(row['measured'])} per step, {human(row['predicted'])} foretold"


if __name__ == "__main__":
    sys.exit(main())
