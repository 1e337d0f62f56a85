"""Show the plan of a run: which rank holds which tensors, where, how many bytes, and which strategy decided it and why.

    python launch/plan.py --config configs/quickstart.yaml --world-size 8 --profile h100-pcie5

Needs no accelerator, no weights and no data. If the training state does not fit, the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.load import load
from trainer.errors import ConfigError, UserError

if TYPE_CHECKING:
    from strategies.core.plan import Plan
    from strategies.planner.step_cost import StepCost


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", metavar="FILE", required=True, help="the run's YAML file")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the job (default 1)")
    parser.add_argument("--ranks-per-machine", type=int, metavar="N", help="default: as many as are left, at most 8")
    parser.add_argument("--profile", metavar="NAME", help="a named machine (h100-pcie5, ...) instead of this one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the plan as JSON too")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a picture of the simulated step (PNG)")
    parser.add_argument(
        "--measure", action="store_true", help="first time a few blocks on this machine; kept in the run folder"
    )
    parser.add_argument("--explain", metavar="UNIT", help="every answer about one unit, for example model.layers.0")
    parser.add_argument("--deepspeed", action="store_true", help="print the DeepSpeed config made from the plan")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.measure and arguments.profile:
        parser.error("--measure times this machine; leave --profile out")
    if arguments.world_size < 1:
        parser.error(f"--world-size {arguments.world_size}: must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    try:
        show(arguments)
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.code
    return 0


def show(arguments: argparse.Namespace) -> None:
    """Print the plan and what else was asked for.

    Raises:
        ConfigError: the config is wrong, or the plan does not fit.
    """
    config = load(arguments.config, arguments.overrides)
    from trainer.machine.probe import probe
    from trainer.machine.profiles import known_rates, profile

    machine = profile(arguments.profile) if arguments.profile else probe()
    if ignored := known_rates(machine).ignored:
        print(ignored, file=sys.stderr)
    from strategies.backends import deepspeed
    from strategies.planner.step_cost import plan_cost
    from strategies.report import full_report
    from trainer.dist.ranks import Ranks
    from trainer.planning.from_config import measure, plan_of, refuse_impossible

    local = arguments.ranks_per_machine or min(arguments.world_size, 8)
    ranks = Ranks(world_size=arguments.world_size, local_world_size=local)
    if arguments.measure:
        for line in measure(config, ranks, machine, lambda line: print(line, file=sys.stderr)):
            print(line)
    plan = plan_of(config, ranks, machine)
    cost = plan_cost(plan)
    print(full_report.text(plan, cost))
    if suggested := [line for strategy in config.strategies.values() for line in strategy.suggest(plan)]:
        print("what would change it most, estimated:")
        print("\n".join(suggested))
    if arguments.explain:
        units = [unit.name for unit in plan.facts.units]
        if arguments.explain not in units:
            raise ConfigError(f"--explain {arguments.explain}: no such unit; the units are {', '.join(units)}")
        print(f"\n{plan.explain(arguments.explain)}")
    if arguments.deepspeed:
        print(f"\n{json.dumps(deepspeed.ds_config(plan), indent=1)}")
    if arguments.json:
        try:
            arguments.json.write_text(json.dumps(full_report.to_json(plan, cost), indent=1))
        except OSError as error:
            raise ConfigError(f"--json {arguments.json}: {error.strerror}") from None
    if arguments.plot:
        plot(plan, cost, arguments.plot)
    refuse_impossible(plan)


def plot(plan: Plan, cost: StepCost | None, path: Path) -> None:
    """Write the picture of the simulated step.

    Raises:
        ConfigError: there is nothing to simulate, or the file cannot be written.
    """
    from trainer.planning.picture import draw

    if cost is None:
        raise ConfigError(
            f"--plot {path}: there is no simulated step; it needs strategies.offload, and the machine's rates from "
            f"`launch/doctor.py --rates` or --profile"
        )
    try:
        draw(plan, cost, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
