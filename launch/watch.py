"""A run on one screen while it trains: loss, speed, MFU, memory, what the link does. Reads the run's folder alone.

From any terminal that sees the folder. It ends with the run; Ctrl-C ends the watching, not the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from deepstow.launch import cli
from deepstow.trainer.run import history, screen

EVERY_S = 1.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(cli.Parser(), "watch", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--once", action="store_true", help="show it once")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the run until it ends; returns the exit code."""
    given, console = parse(argv), Console()
    return cli.answered(lambda: _watch(given.run, console, once=given.once or not console.is_terminal))


def _watch(folder: Path, console: Console, *, once: bool) -> None:
    run = history.read(folder)
    if once:
        console.print(screen.shown(run, console.width), soft_wrap=True)
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(screen.shown(run, console.width), refresh=True)
            if run.last("train_loss") is not None:
                return
            time.sleep(EVERY_S)
            run = history.read(folder)


if __name__ == "__main__":
    sys.exit(main())
