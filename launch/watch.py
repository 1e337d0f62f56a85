"""A run on one screen while it trains: loss, speed, MFU, memory, what the link does. Reads the run's folder alone.

From any terminal that sees the folder. It ends with the run; Ctrl-C ends the watching, not the run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # runs where the package is not installed, too
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.launch import cli
from deepstow.trainer.run import history, screen

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
            columns = shutil.get_terminal_size((screen.WIDTH, 24)).columns
            print("" if once else CLEAR, *screen.lines(run, columns), sep="\n", flush=True)
            if once or run.last("train_loss") is not None:
                return
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    sys.exit(main())
