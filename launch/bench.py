"""Measure this project against its peers on this machine.

Every contender does the same work in a fresh process, in turn, over several rounds. The table is printed; the record
with every run's figures goes to a folder under benchmarks/records. A contender that failed is a row of the table.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # runs where the package is not installed, too
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.benchmarks.harness import record, work
from deepstow.launch import cli
from deepstow.trainer.distributed.ranks import Ranks, settle_environment
from deepstow.trainer.errors import ConfigError, nearest
from deepstow.trainer.machine.probe import cores

say = partial(print, flush=True)
THEMES = {
    "offload": (work.OFFLOAD, "training with offload: memory and speed"),
    "recompute": (work.RECOMPUTE, "keeping less for backward: memory and speed"),
    "linear": (work.LINEAR, "routes of linear layers: speed"),
    "compute": (work.COMPUTE, "attention, compiled blocks, fused kernels: speed"),
}
IN_CHECKOUT = Path(__file__).resolve().parent.parent / "benchmarks" / "records"
RECORDS = IN_CHECKOUT if IN_CHECKOUT.is_dir() else Path("records")  # installed: in the folder where one works


def parser() -> cli.Parser:
    """One subcommand per theme. ``benchmarks/harness/work.py`` parses the values and raises ConfigError itself."""
    root = cli.explained(cli.Parser(), "bench", __doc__)
    themes = root.add_subparsers(dest="theme", metavar="THEME", required=True)
    for name, (contenders, text) in THEMES.items():
        command = themes.add_parser(name, help=text, allow_abbrev=False)
        names = ", ".join(contender.label for contender in contenders)
        _add_choice(command, "--model", work.MODELS, "45m")
        _add(command, "--tokens", work.whole, None, "N", "per optimizer step; determines the rows")
        _add(command, "--rows", work.whole, None, "N", "of a micro-batch")
        _add(command, "--length", work.whole, None, "N", "tokens of a row")
        _add(command, "--accumulation", work.whole, "1", "N", "micro-batches per step")
        _add_choice(command, "--dtype", work.DTYPES, "fp32")
        _add(command, "--steps", work.whole, "5", "N", "measured optimizer steps")
        _add(command, "--rounds", work.whole, "3", "N", "runs of each contender")
        command.add_argument("--subjects", default="", metavar="NAMES", help=f"some of {names} (default: all)")
        command.add_argument("--out", type=Path, default=RECORDS, metavar="FOLDER", help="where the record is made")
    offload, again = themes.choices["offload"], themes.choices["recompute"]
    _add(themes.choices["compute"], "--documents", work.whole, "1", "N", "that every row is packed of")
    offload.add_argument("--recompute", action="store_true", help="every contender recomputes its blocks in backward")
    _add(offload, "--ranks", work.whole, "1", "N", "processes, each with a device or its part of the cores")
    _add(offload, "--disk", work.folder, None, "FOLDER", "on a local drive, for ours-disk and zero-infinity")
    _add(offload, "--host-memory", work.memory, None, "SIZE", "that ours may use; ours-disk has the rest on the disk")
    offload.add_argument("--gpu-memory", default="", metavar="SIZES", help="budgets for ours-budget: 16GiB,24GiB")
    _add_choice(again, "--attention", work.ATTENTIONS, "sdpa")
    _add(again, "--dropout", work.part, "0", "P", "of attention's probabilities")
    return root


def _add(
    parser: argparse.ArgumentParser, option: str, parse: Callable[..., Any], default: str | None, value: str, text: str
) -> None:
    text = f"{text} (default {default or 'of the model'})"
    parser.add_argument(option, type=partial(parse, option), default=default, metavar=value, help=text)


def _add_choice(parser: argparse.ArgumentParser, option: str, allowed: Iterable[str], default: str) -> None:
    _add(parser, option, partial(work.choice, allowed=allowed), default, "NAME", ", ".join(allowed))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raise ConfigError, with the closest option, for one that does not exist."""
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        options = [f"--{name.replace('_', '-')}" for name in vars(arguments) if name != "theme"]
        hint = nearest(unknown[0].split("=")[0], options, cutoff=0.5)
        raise ConfigError(f"{unknown[0]}: no such option; there are {', '.join(options)}{hint}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    return cli.answered(lambda: measure(list(sys.argv[1:] if argv is None else argv)))


def measure(argv: Sequence[str]) -> int:
    """Measure what is asked for. Returns the exit code."""
    arguments = parse(argv)
    ranks = getattr(arguments, "ranks", 1)
    settle_environment(Ranks(0, 0, ranks, ranks), cores()[1])  # torch's threads, here and in contenders' processes
    command = shlex.join(["deepstow", "bench", *argv])
    return record.answer(arguments.theme, *wanted(arguments), arguments.rounds, arguments.out, command, say)


def wanted(given: argparse.Namespace) -> tuple[work.Work, list[work.Contender]]:
    """The work and the contenders that the options ask for. Raise ConfigError if they contradict each other."""
    names = {field.name for field in fields(work.Work)} | {"tokens"}
    options = {name: value for name, value in vars(given).items() if name in names and value is not None}
    budgets = listed(getattr(given, "gpu_memory", ""))
    todo = work.work(**options)
    if todo.ranks > 1 and budgets:
        raise ConfigError("--gpu-memory: ours-budget is for one rank; leave --ranks out")
    theme = work.OFFLOAD_OVER_RANKS if todo.ranks > 1 else THEMES[given.theme][0]
    return todo, work.contenders(listed(given.subjects), budgets, theme)


def listed(text: str) -> list[str]:
    """The parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
