"""What a whole run takes: operations, days, money, energy; also with up to eight times as many ranks.

Needs no accelerator, no weights and no data. At the simulated step, where the machine's rates are known, and at a share
of its peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepstow.launch import cli, plan
from deepstow.trainer.errors import ConfigError, write_line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = cli.explained(cli.Parser(), "cost", __doc__)
    plan.add_common(parser)
    plan.add_network(parser)
    add = parser.add_argument
    add("--tokens", required=True, metavar="N", help="of the run, as in 15B")
    add("--price-per-gpu-hour", metavar="X", help="in any currency")
    add("--power-watts", metavar="X", help="of a GPU and its share of the rest")
    add("--mfu", metavar="X", help="the share of the peak beside the simulated step (0.4)")
    arguments = cli.parsed(parser, argv)
    if wrong := plan.wrong_ranks(arguments) if arguments.config else cli.needs_config(arguments.overrides):
        parser.error(wrong)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    return cli.answered(lambda: show(arguments))


def show(arguments: argparse.Namespace) -> None:
    """Print what the run takes; raise ConfigError if it does not fit."""
    from deepstow.strategies.report import run_budget

    words = ("tokens", "price_per_gpu_hour", "power_watts", "mfu")
    try:
        request = run_budget.read({name: getattr(arguments, name) for name in words})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = plan.config_of(arguments)
    machine, ranks = plan.machine_of(arguments), plan.ranks_of(arguments)
    from deepstow.trainer.planning.fit import explained
    from deepstow.trainer.planning.from_config import plans_of, refuse_impossible
    from deepstow.trainer.planning.hybrid import budget

    with explained(config, ranks, machine):
        plans = plans_of(config, ranks, machine)
        for stage_plan in plans:
            refuse_impossible(stage_plan)
    write_line("\n".join(budget(config, ranks, machine, arguments.network, plans, request)))


if __name__ == "__main__":
    cli.seldom_collect()
    sys.exit(main())
