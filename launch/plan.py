"""Show the plan of a run: does it fit, how long is a step, what binds, what does each strategy do, what would help.

Needs no accelerator, no weights and no data. ``--full`` has every tensor: where it rests, how many bytes, who decided
it and why. If the training state does not fit, the exit code is 2, and a table says what would.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepstow.launch import cli
from deepstow.launch.shipped import load
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.sizes import parse_bytes
from deepstow.strategies.planner.step_cost import StepCost
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, ExitCode, warning, write_line
from deepstow.trainer.machine.probe import Machine

MOST_RANKS = 1_000_000
# Options that this command had: the command that has them, and whether by the same name.
OF_COST = dict.fromkeys(("--tokens", "--price-per-gpu-hour", "--power-watts", "--mfu"), ("cost", True))
MOVED = {"--fit": ("fit", False), "--search": ("search", False), **OF_COST}


def say(line: str) -> None:
    """Progress and remarks, beside what is asked for."""
    write_line(line, sys.stderr)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = cli.explained(cli.Parser(), "plan", __doc__)
    add_common(parser)
    add = parser.add_argument
    add("--full", action="store_true", help="every tensor, bucket and stage, who decided it and why")
    add("--json", type=Path, metavar="PATH", help="write the plan as JSON too")
    add("--schema", action="store_true", help="print the JSON schema of plan.json and stop")
    add("--check", type=Path, metavar="PATH", help="whether a plan.json can be carried out, and stop")
    add("--plot", type=Path, metavar="PATH", help="draw the step, or the memory (.png, .svg, .pdf)")
    add("--trace", type=Path, metavar="PATH", help="write the step as a trace for ui.perfetto.dev (JSON)")
    add("--measure", action="store_true", help="first time a few blocks on this machine")
    add("--explain", metavar="UNIT", help="every answer about one unit, for example model.layers.0")
    add("--deepspeed", action="store_true", help="print the DeepSpeed config made from the plan")
    arguments = cli.parsed(parser, argv)
    if wrong := _wrong(arguments) or wrong_ranks(arguments):
        parser.error(wrong)
    return arguments


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of all commands that plan: the config, the ranks and the machine."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="the run's YAML file")
    add("--ranks", "--world-size", dest="world_size", type=int, default=1, metavar="N", help="of the job (default 1)")
    add("--ranks-per-machine", type=int, metavar="N", help="default: as many as are left, at most 8")
    add_machine(parser)
    add("overrides", nargs="*", metavar="key=value", help="changes to the config")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Options that say which machine."""
    add = parser.add_argument
    add("--profile", metavar="NAME", help="a named machine (h100-pcie5, ...) instead of this one")
    add("--gpu-memory", type=_size, metavar="SIZE", help="of the device, instead of the machine's")
    add("--host-memory", type=_size, metavar="SIZE", help="that is free, instead of the machine's")


def add_network(parser: argparse.ArgumentParser) -> None:
    """How fast ranks of several machines are connected."""
    parser.add_argument("--network", type=_gigabits, metavar="GBITS", help="of a rank to other machines, per second")


def _wrong(given: argparse.Namespace) -> str:
    """What is wrong with options together; empty if nothing is."""
    if given.measure and given.profile:
        return "--measure times this machine; leave --profile out"
    if not (given.config or given.schema or given.check):
        return cli.needs_config(given.overrides)
    return ""


def wrong_ranks(given: argparse.Namespace) -> str:
    """What is wrong with the numbers of ranks; empty if nothing is."""
    if not 1 <= given.world_size <= MOST_RANKS:
        return f"--ranks {given.world_size}: must be from 1 to {MOST_RANKS}"
    local = given.ranks_per_machine
    if local is not None and not 1 <= local <= given.world_size:
        return f"--ranks-per-machine {local}: must be from 1 to the number of ranks, {given.world_size}"
    return ""


def _gigabits(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number more than 0")
    return rate


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if line := cli.moved("plan", words, MOVED):
        write_line(line, sys.stderr)
        return ExitCode.CONFIG
    arguments = parse(words)
    if arguments.schema or arguments.check:
        return cli.answered(lambda: show_file(arguments.check))

    def answer() -> None:
        cli.refuse_paths(json=arguments.json, trace=arguments.trace)
        cli.refuse_picture(arguments.plot)
        show(arguments)

    return cli.answered(answer)


def show(arguments: argparse.Namespace) -> None:
    """Print the plan and what else was asked for; raise ConfigError if it does not fit."""
    config = config_of(arguments)
    machine, ranks = machine_of(arguments), ranks_of(arguments)
    from deepstow.strategies.parallel import deepspeed
    from deepstow.strategies.planner.step_cost import plan_cost
    from deepstow.strategies.report import full_report, plan_table
    from deepstow.trainer.planning import evaluation
    from deepstow.trainer.planning.fit import explained
    from deepstow.trainer.planning.from_config import advice, measure, plans_of, refuse_impossible, short
    from deepstow.trainer.planning.positions import beyond

    with explained(config, ranks, machine):
        if arguments.measure:
            write_line("\n".join(measure(config, ranks, machine, say)))
        plans = plans_of(config, ranks, machine)
    plan = plans[0]
    cost = plan_cost(plan)
    before = [line for recipe in config.switched_on for line in recipe.plan_lines(config, plan, machine)]
    if evaluation.asked(config):
        line = evaluation.rows(config, plan).line
        before += [line] if line else []
    edits, lacks = advice(config, plan), ""
    if arguments.full:
        write_line(full_report.text(plan, cost, edits, plans, before))
    else:
        summary = short(
            config, plans, edits, before, more="deepstow plan --full, --explain model.layers.0, --plot FILE.png"
        )
        write_line("\n".join(summary.lines))
        lacks = summary.lacks
    for line in beyond(config, plan.facts.run.positions):
        say(line)
    if arguments.explain:
        of_units = {unit.name: stage_plan for stage_plan in plans for unit in stage_plan.facts.units}
        if arguments.explain not in of_units:
            raise ConfigError(f"--explain {arguments.explain}: no such unit; the units are {', '.join(of_units)}")
        write_line("\n".join(["", *plan_table.explained(of_units[arguments.explain], arguments.explain)]))
    if arguments.deepspeed:
        write_line(f"\n{json.dumps(deepspeed.ds_config(plan), indent=1)}")
    if arguments.json:
        write(arguments.json, full_report.to_json(plan, cost))
    if arguments.plot:
        plot(config, plan, cost, arguments.plot)
    if arguments.trace:
        trace(cost, arguments.trace)
    with explained(config, ranks, machine):
        for stage_plan in plans:
            refuse_impossible(stage_plan)
    if lacks:
        say(warning(lacks))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write what ``--json`` asks for."""
    with cli.file_of("--json", path):
        path.write_text(json.dumps(content, indent=1))


def show_file(path: Path | None) -> None:
    """Print the schema of plan.json, or check the one at ``path``: a line for everything that is wrong with it."""
    from deepstow.strategies.report import plan_json
    from deepstow.trainer.run import foreign

    if path is None:
        print(json.dumps(plan_json.PlanFile.model_json_schema(), indent=2))
        return
    with cli.file_of("--check", path):
        problems = plan_json.problems(foreign.text_of(path))
    if problems:
        raise ConfigError(f"{path}: {line}" for line in problems)
    write_line(f"{path}: can be carried out")


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """The config, with the attention that its run would take."""
    config = load(arguments.config, arguments.overrides)
    from deepstow.trainer.planning.kernel_choice import settled

    return settled(config, arguments.world_size, here=not arguments.profile, say=say)


def machine_of(arguments: argparse.Namespace) -> Machine:
    """This machine or the named one, with the sizes of memory that are given."""
    from deepstow.trainer.machine.probe import probe
    from deepstow.trainer.machine.profiles import known_rates, profile, sized

    machine = profile(arguments.profile) if arguments.profile is not None else probe()
    if ignored := known_rates(machine).ignored:
        say(ignored)
    return sized(machine, arguments.gpu_memory, arguments.host_memory)


def ranks_of(arguments: argparse.Namespace) -> Ranks:
    """The ranks of the job that is planned."""
    from deepstow.trainer.distributed.ranks import Ranks

    local = arguments.ranks_per_machine or min(arguments.world_size, 8)
    return Ranks(world_size=arguments.world_size, local_world_size=local)


def plot(config: RunConfig, plan: Plan, cost: StepCost | None, path: Path) -> None:
    """Write the picture of the simulated step; without one, of the memory of a rank."""
    from deepstow.strategies.core.protocol import HasBudget
    from deepstow.trainer.planning import picture

    placing = (strategy for strategy in config.strategies.values() if isinstance(strategy, HasBudget))
    budget = next((strategy.budget(plan.facts) for strategy in placing), None)
    name = config.model.name_or_path or str((config.model.config or {})["model_type"])
    try:
        picture.save(picture.draw(plan, cost, model=name, budget=budget), path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None


def trace(cost: StepCost | None, path: Path) -> None:
    """Write the simulated step as a Chrome trace."""
    from deepstow.trainer.planning import chrome_trace

    if cost is None:
        raise ConfigError(f"--trace {path}: there is no simulated step: nothing is stowed, or rates are unknown")
    with cli.file_of("--trace", path):
        chrome_trace.write({"simulated": (cost.seconds, cost.outcome.events)}, path)


if __name__ == "__main__":
    cli.seldom_collect()
    sys.exit(main())
