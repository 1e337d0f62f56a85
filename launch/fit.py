"""Which ways of training a model fit into a machine: all weights, LoRA, QLoRA, with recomputation, offload, a disk.

Needs no accelerator, no weights and no data. ``--write FILE`` writes a row of the table as a whole config.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepstow.launch import cli, plan
from deepstow.trainer.errors import ConfigError, write_line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = cli.explained(cli.Parser(), "fit", __doc__)
    add = parser.add_argument
    add("--config", metavar="FILE", help="the run's YAML file")
    add("--model", metavar="NAME_OR_FOLDER", help="instead of a config file; or give model.config.model_type=...")
    add("--ranks", type=_counts, default=(1,), metavar="N[,N]", help="cards of the machine (default 1)")
    plan.add_machine(parser)
    add("--write", type=Path, metavar="FILE", help="write what fits, as a whole config")
    add(
        "--row",
        type=int,
        metavar="N",
        help="with --write: this row of the table (default: the first within 10 %% of the fastest that fits)",
    )
    add("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = cli.parsed(parser, argv)
    if arguments.model and arguments.config:
        parser.error("--model is instead of --config; leave one of the two out")
    if arguments.row is not None and arguments.write is None:
        parser.error("--row is for --write FILE")
    arguments.world_size, *arguments.more = arguments.ranks
    arguments.ranks_per_machine = None
    return arguments


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= plan.MOST_RANKS for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be one or more numbers from 1, as in 2 or 1,2,4,8")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code: 0 whatever the answer is, but if nothing is there to write."""
    arguments = parse(argv)

    def answer() -> None:
        cli.refuse_paths(write=arguments.write)
        if arguments.write is not None and arguments.write.exists():
            raise ConfigError(f"--write {arguments.write}: is there already; name another file")
        show(arguments)

    return cli.answered(answer)


def show(arguments: argparse.Namespace) -> None:
    """Print the table of what fits, and write a row of it if asked to."""
    config = plan.config_of(arguments) if arguments.config else None
    machine, ranks = plan.machine_of(arguments), plan.ranks_of(arguments)
    from deepstow.trainer.planning import fit

    written = None
    if config is None:
        config = fit.config_of(arguments.model, arguments.overrides, accelerated=machine.device_kind != "cpu")
        written = fit.unwritten(config)
    fits = fit.Fit(config, ranks, machine, written=written, more=tuple(arguments.more), say=plan.say)
    with config.placing():
        rows = fits.rows(as_given=bool(arguments.config))
        write_line("\n".join([*fits.heading(), "", *fit.lines(rows)]))
        if arguments.write is not None:
            row = fit.chosen(rows, config, arguments.row)
            text = fit.text(config, row, machine, arguments.write)
            with cli.file_of("--write", arguments.write):
                arguments.write.write_text(text, encoding="utf-8")
            write_line(f"written: {arguments.write}, row {rows.index(row) + 1}: {row.training}")


if __name__ == "__main__":
    cli.seldom_collect()
    sys.exit(main())
