"""The best ways to use all ranks of a job: how many copies, stages and parts, simulated and ranked by seconds.

Needs no accelerator, no weights and no data. The last lines are what to write into the config for the first of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepstow.launch import cli, plan
from deepstow.trainer.errors import ExitCode, write_line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = cli.explained(cli.Parser(), "search", __doc__)
    plan.add_common(parser)
    parser.add_argument("--lossy", action="store_true", help="compressed exchanges between machines, too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the answer as JSON too")
    plan.add_network(parser)
    arguments = cli.parsed(parser, argv)
    if wrong := plan.wrong_ranks(arguments) if arguments.config else cli.needs_config(arguments.overrides):
        parser.error(wrong)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if line := cli.moved("search", words, plan.OF_COST):
        write_line(line, sys.stderr)
        return ExitCode.CONFIG
    arguments = parse(words)

    def answer() -> None:
        cli.refuse_paths(json=arguments.json)
        show(arguments)

    return cli.answered(answer)


def show(arguments: argparse.Namespace) -> None:
    """Print the best ways to use all ranks."""
    config = plan.config_of(arguments)
    machine = plan.machine_of(arguments)
    ranks = plan.ranks_of(arguments)
    from deepstow.trainer.planning.hybrid import search

    lines, content = search(config, ranks, machine, arguments.network, plan.say, lossy=arguments.lossy)
    write_line("\n".join(lines))
    if arguments.json:
        plan.write(arguments.json, content)


if __name__ == "__main__":
    cli.seldom_collect()
    sys.exit(main())
