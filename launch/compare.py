"""Two runs beside each other: settings that differ, speed, memory, losses; and their curves as a picture.

Losses are compared to the last digit, so two runs that should be the same are seen to be, or from which step on they
are not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # runs where the package is not installed, too
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.launch import cli
from deepstow.strategies.report.table import table
from deepstow.trainer.config.yaml_file import leaves
from deepstow.trainer.errors import ConfigError, write_line
from deepstow.trainer.planning import picture
from deepstow.trainer.run import history


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(cli.Parser(), "compare", __doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw both curves into a picture, as in curves.png")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code."""
    arguments = parse(argv)
    return cli.answered(lambda: _compare(arguments.runs, arguments.plot))


def _compare(folders: Sequence[Path], plot: Path | None) -> None:
    cli.refuse_picture(plot)
    first, second = runs = [history.read(folder) for folder in folders]
    write_line("\n".join(table(history.SUMMARY, map(history.summary, runs), {*history.SUMMARY[1:]})))
    write_line(f"\n{history.agreement(first, second)}\n")
    changed = list(_changed(first.config, second.config))
    write_line("\n".join(table(("setting", *map(str, folders)), changed)) if changed else "no setting differs")
    if plot is not None:
        try:
            picture.save(history.draw(runs), plot)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {plot}: {error}") from None
        write_line(f"\ncurves: {plot}")


def _changed(first: Any, second: Any) -> Iterator[tuple[str, str, str]]:
    """A row for each key that is not the same in both configs."""
    before, after = ({".".join(key): value for key, value in leaves((), tree)} for tree in (first, second))
    for key in dict.fromkeys([*before, *after]):
        equal = before.get(key) == after.get(key)
        if not equal and key not in ("training.output_dir", "training.resume_from_checkpoint"):
            yield key, _shown(before.get(key)), _shown(after.get(key))


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
