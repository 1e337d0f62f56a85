"""Make the plan of a config; planning imports no trainer. Refused: strategies that conflict, plans that do not fit,
compilers that are missing, unusable run folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.compose import compose, in_order, refusals, requirements_of
from deepstow.strategies.core.plan import Conflict, Plan, Tier
from deepstow.strategies.core.protocol import HasBudget, MemoryRefusal, Refusal, Requirement
from deepstow.strategies.core.sizes import SHARE, human
from deepstow.strategies.parallel import deepspeed
from deepstow.strategies.parallel.autotp import DIVIDED, IN_SLICES
from deepstow.strategies.planner.budget import device_budget
from deepstow.strategies.planner.overlap import divisors
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.strategies.report import full_report, short_plan
from deepstow.trainer.config.check import section_faults
from deepstow.trainer.config.conflicts import faults, language_alone, of_recipes, of_task
from deepstow.trainer.config.recipe import RECIPES, Recipe
from deepstow.trainer.config.sections import flat
from deepstow.trainer.config.yaml_file import Fault, dotted
from deepstow.trainer.errors import ConfigError, TooLargeError, warning, write_line
from deepstow.trainer.machine import block_timing
from deepstow.trainer.machine.probe import peak_flops
from deepstow.trainer.machine.profiles import known_rates
from deepstow.trainer.model import attention, build
from deepstow.trainer.model.build import config_of
from deepstow.trainer.model.shrink import PER_LAYER
from deepstow.trainer.planning import facts, positions
from deepstow.trainer.tasks.task import TASKS, only_language
from deepstow.trainer.values import Values

if TYPE_CHECKING:
    from deepstow.strategies.core.facts import Facts
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.distributed.ranks import Ranks
    from deepstow.trainer.machine.probe import Machine

WRITTEN = (
    "config.yaml",
    "facts.json",
    "plan.json",
    "plan.txt",
    "ds_config.json",
    "metrics.jsonl",
    "exit.json",
)  # by a run


def plan_of(config: RunConfig, ranks: Ranks, machine: Machine, *, masked: bool = True, resumes: bool = False) -> Plan:
    """The plan of a run. On a single machine the block times are used that an earlier run in the same folder measured;
    a run that ``resumes`` uses those that it started with. ``masked``: attention needs a mask (``run/collated.py``).

    Raises:
        ConfigError: strategies conflict, or one cannot work with these facts; TooLargeError: memory is not enough.
    """
    check_options(config, ranks.world_size, installed=False)
    undivided = facts.gather(config, ranks.world_size, ranks.local_world_size, machine, masked=masked)
    try:
        local = narrowed(config, undivided, ranks.rank)
    except Refusal as refused:
        raise _located(config, refused) from None
    if Requirement.BLOCK_TIMES in requirements_of(config.strategies) and ranks.world_size == ranks.local_world_size:
        folder = Path(config.training.output_dir)
        local = replace(local, unit_times=block_timing.read(folder, local, "unit_times" if resumes else "measured"))
    try:
        plan = compose(config.strategies, local)
    except (Conflict, Refusal) as refused:
        raise _located(config, _largest(config, undivided, refused)) from None
    return plan


def narrowed(config: RunConfig, whole: Facts, rank: int) -> Facts:
    """The facts of the part of the model that ``rank`` has. Raises Refusal if it cannot be divided so."""
    for strategy in in_order(config.strategies).values():
        whole = strategy.narrowed(whole, rank)
    return whole


def _largest(config: RunConfig, whole: Facts, refused: Conflict | Refusal) -> Conflict | Refusal:
    """``refused``, or the refusal of another stage of the pipeline that needs more of the same memory."""
    if whole.run.stages == 1 or not isinstance(refused, MemoryRefusal):
        return refused
    for rank in whole.run.grid.groups("stage")[0]:
        try:
            compose(config.strategies, narrowed(config, whole, rank))
        except MemoryRefusal as other:
            if other.tier is refused.tier and other.needed > refused.needed:
                refused = other
        except Refusal:
            pass  # that rank says so itself
    return refused


def plans_of(config: RunConfig, ranks: Ranks, machine: Machine, **how: Any) -> list[Plan]:
    """The plans of a run's stages, in order; one where the model is not cut. Arguments and errors: ``plan_of``."""
    first = plan_of(config, replace(ranks, rank=0), machine, **how)
    others = first.facts.run.grid.groups("stage")[0][1:]
    return [first, *(plan_of(config, replace(ranks, rank=rank), machine, **how) for rank in others)]


def budget_of(config: RunConfig, plan: Plan) -> int:
    """Bytes of the device that the run may use, for what comes before training as well."""
    allowed = (placer.budget(plan.facts) for placer in config.strategies.values() if isinstance(placer, HasBudget))
    return min([plan.facts.machine.device_bytes, *allowed])


def budgets(config: RunConfig, plan: Plan) -> dict[Tier, int]:
    """Bytes of each memory that one rank should have at most: what a strategy is given, else what auto means."""
    machine, allowed = plan.facts.machine, [each for each in config.strategies.values() if isinstance(each, HasBudget)]
    on_host = min([machine.host_bytes, *(each.host_budget(plan.facts) for each in allowed)])
    return {
        Tier.DEVICE: budget_of(config, plan) if allowed else device_budget(machine),
        Tier.HOST: on_host if allowed else int(SHARE * machine.host_bytes),
    }


class Short(NamedTuple):
    """The short plan, and what memory ``lacks``: a line that is a warning, where there is something."""

    lines: list[str]
    lacks: str


def short(config: RunConfig, plans: Sequence[Plan], edits: Sequence[str], notes: Sequence[str], *, more: str) -> Short:
    """The plan of a run's stages in a few lines. Arguments: ``short_plan.lines``."""
    allowed = budgets(config, plans[0])
    text_lines = short_plan.lines(plans, allowed, advice=edits, notes=notes, asked=config.strategies.keys(), more=more)
    beyond = {tier: size for plan in plans for tier, size in short_plan.missing(plan, allowed).items()}
    lacks = ", ".join(f"the {tier.value} {human(size)}" for tier, size in beyond.items())
    cure = "deepstow fit --config FILE shows what fits"
    return Short(text_lines, f"by the plan memory is short of what is safe: {lacks}; {cure}" if lacks else "")


def show_plan(
    config: RunConfig, machine: Machine, plans: Sequence[Plan], plan: Plan, longest: int, lines: Sequence[str]
) -> dict[str, str]:
    """Print the short plan. Returns files by name: the whole plan as text and as JSON, the config, and DeepSpeed's.

    Args:
        plans: of all stages, of which ``plan`` is this rank's.
        longest: tokens of the longest row.
        before: lines above the plan.
    """
    cost, edits = plan_cost(plan), advice(config, plan)
    remarks = [known_rates(machine).ignored, attention.trained_otherwise(config.model, config_of(config))]
    if longest > (places := plan.facts.run.positions):  # some row may be so long
        remarks += positions.beyond(config, places)
    place = Path(config.training.output_dir) / "plan.txt"
    summary = short(config, plans, edits, lines, more=f"{place}, or deepstow plan --full")
    for line in [*filter(None, remarks), "\n".join(["", *summary.lines, ""])]:
        write_line(line)
    if summary.lacks:
        write_line(warning(summary.lacks))
    return {
        "config.yaml": config.dump(),
        "plan.json": json.dumps(full_report.to_json(plan, cost), indent=1),
        "plan.txt": full_report.text(plan, cost, edits, plans, lines) + "\n",
        "ds_config.json": json.dumps(deepspeed.ds_config(plan), indent=1),
    }


def _located(config: RunConfig, refused: Conflict | Refusal) -> ConfigError:
    """The error of a strategy as one line that begins with file and line of its key, as every error of a config."""
    if isinstance(refused, Conflict):
        return ConfigError(config.located(f"strategies.{refused.second}", str(refused)))
    if not isinstance(refused, MemoryRefusal):
        return config.error(refused.key, refused.value, refused.cure)

    def line() -> str:
        return config.error(refused.key, refused.value, refused.cure).lines[0]

    return TooLargeError(line, refused.tier.value, lambda: refused.needed, refused.budget)


def check_options(config: RunConfig, world_size: int, *, installed: bool = True) -> None:
    """Raise ConfigError with a line for each option that cannot work in such a run, known before data is read or the
    model is described; with ``installed`` also for packages and the device here, while a plan may be for another
    machine.
    """
    problems = list[Refusal]()
    if config.model.attn_implementation == attention.AUTO:
        problems.append(Refusal(attention.KEY, attention.AUTO, "is for a run of a config file; write the kernel here"))
    for strategy in in_order(config.strategies).values() if installed else ():
        try:
            strategy.check_installed()
        except Refusal as refused:
            problems.append(refused)
    if installed:
        from deepstow.strategies.engine.memory import accelerator

        on_cpu = bool(config.training.use_cpu) or accelerator.kind() is None
        problems += attention.refusals(config, on_cpu=on_cpu)
        if on_cpu and config.training.fp16 and Requirement.DEEPSPEED not in requirements_of(config.strategies):
            cure = "Accelerate trains in fp32 on the CPU then, without a word; write training.bf16, or leave it out"
            problems.append(Refusal("training.fp16", True, cure))
    compiles = config.training.compile_key
    if installed and compiles and config.training.compile_backend:
        from deepstow.strategies.engine.forward import compiled

        if why := compiled.missing(config.training.compile_backend, on_cpu=on_cpu):
            problems.append(Refusal(f"training.{compiles}", getattr(config.training, compiles), why))
    if config.task not in TASKS:  # whose code runs after what can be said without it
        facts.refuse(config, problems)
    task = config.chosen_task
    of_strategies = [*refusals(config.strategies, facts.run_facts(config, world_size))]
    recipes = [recipe for name, recipe in RECIPES.items() if getattr(config, name) is not None]
    of_ours = [why for recipe in recipes for why in recipe.refusals(config, world_size, installed=installed)]
    problems = [*task.refusals(config), *of_strategies, *of_ours, *problems]
    facts.refuse(config, problems)
    if config.task not in TASKS and (of_it := of_task(task, flat(config.tree()))):
        raise ConfigError(config.error(dotted(fault.key), fault.value, fault.what).lines[0] for fault in of_it)
    _refuse_outside(config, world_size, installed=installed)
    with config.placing():
        for part in config.data.parts():
            part.asked_format()
            part.asked_reader()


def _refuse_outside(config: RunConfig, world_size: int, *, installed: bool) -> None:
    """Raise ConfigError for what a recipe from outside cannot do in such a run; first for its options."""
    outer, problems = [recipe for recipe in config.switched_on if recipe.name in config.recipes], list[Fault]()
    for recipe in outer:
        problems += section_faults(recipe.section, config.recipes[recipe.name], ("recipes", recipe.name))
        if type(recipe).exports is not Recipe.exports and type(recipe).writer is Recipe.writer:
            key, what = ("recipes", recipe.name), "has exports, and no method writer(config, exact) that makes them"
            problems.append(Fault(key, config.recipes[recipe.name], what))
    if outer and not problems:
        values = {recipe.name: Values(recipe.options(config).model_dump()) for recipe in outer}
        sections = flat(config.tree()) | values | {"recipes": Values(values)}
        problems += faults(sections, of_recipes(outer, sections))
        alone = [f"recipes.{recipe.name}" for recipe in outer if recipe.language]
        problems += faults(sections, language_alone(config.chosen_task, alone))
    if problems:
        raise ConfigError(config.error(dotted(fault.key), fault.value, fault.what).lines[0] for fault in problems)
    facts.refuse(config, [why for recipe in outer for why in recipe.refusals(config, world_size, installed=installed)])


def measure(config: RunConfig, ranks: Ranks, machine: Machine, say: Callable[[str], None]) -> Iterator[str]:
    """Time a few blocks of the configured model on this machine, and store the times in the run folder; yields lines to
    print. Raises ConfigError: no plan would use the times, the folder cannot be written, the model cannot be built, or
    nothing could be measured.
    """
    only_language(config, "--measure")
    if Requirement.BLOCK_TIMES not in requirements_of(config.strategies):
        raise ConfigError("--measure: block times are for strategies.offload and tensor, and none of them is on")
    planned = plan_of(config, ranks, machine).facts  # refuses what cannot be planned
    if planned.run.slices > 1:
        raise ConfigError("--measure: blocks of a slice of a row cannot be timed by themselves; a run times its own")
    if why := next(filter(None, (recipe.not_timed(config) for recipe in config.switched_on)), ""):
        raise ConfigError(f"--measure: {why}; a run times its own")
    if planned.run.tensor > 1 and config_of(config).model_type not in IN_SLICES:
        what = f"blocks of {config_of(config).model_type} cannot be built as wide as those of a rank"
        raise ConfigError(f"--measure: {what}; without strategies.tensor they can be timed")
    folder = Path(config.training.output_dir)
    refuse_folder(config)
    planned = replace(planned, unit_times=block_timing.read(folder, planned, "unit_times"))  # for a run that is resumed

    def make(blocks: int) -> Any:
        from deepstow.strategies.engine.forward.compiled import compile_blocks

        section = config.model
        hf_config = config_of(config)
        text = hf_config.get_text_config()
        text.num_hidden_layers = blocks
        for name in PER_LAYER:
            if getattr(text, name, None):
                setattr(text, name, getattr(text, name)[:blocks])
        if (degree := planned.run.tensor) > 1:
            text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            for name in (name for name in DIVIDED if getattr(text, name, None)):
                setattr(text, name, getattr(text, name) // degree)
        # The same shape, with random weights.
        fresh = section.model_copy(update={"name_or_path": None, "config": {"model_type": hf_config.model_type}})
        built = build.build(fresh, hf_config, seed=config.training.seed, partitioned=False)
        if (backend := config.training.compile_backend) is not None:
            compile_blocks(built, backend)
        return built

    chunks = divisors(planned.run.micro_batch) if planned.run.tensor > 1 else (1,)
    times = block_timing.measure(make, planned, machine.device_kind, say, chunks)
    if times is None:
        raise ConfigError("--measure: backward did not run through any block; is any parameter trained?")
    block_timing.store(folder, planned, times)
    yield f"measured, and kept in {folder / block_timing.FILE}:"
    yield from block_timing.lines(planned, times)


def refuse_folder(config: RunConfig) -> None:
    """Raise ConfigError unless the run folder exists or can be made. It is not made: the run may still be refused."""
    folder = Path(config.training.output_dir)
    try:
        why = _why_unusable(folder)
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL in it
        why = f"no folder can have this name ({getattr(error, 'strerror', None) or error})"
    if why:
        raise config.error("training.output_dir", config.training.output_dir, f"{why}; name another folder")


def _why_unusable(folder: Path) -> str:
    with suppress(FileNotFoundError, NotADirectoryError):
        folder.stat()
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    if not os.access(nearest, os.W_OK):
        return f"{nearest} may not be written"
    blocking = next((path for name in WRITTEN if (path := folder / name).exists() and not path.is_file()), None)
    return "" if blocking is None else f"{blocking} is no file, and a run writes one there"


def advice(config: RunConfig, plan: Plan) -> list[str]:
    """Lines for people: the changes of the config that would gain the most."""
    placing = (strategy for strategy in config.strategies.values() if isinstance(strategy, HasBudget))
    edits = [line for strategy in placing for line in strategy.suggest(plan)]
    peak = peak_flops(plan.facts.machine.name)
    if config.training.bf16 and "fp16" in peak and "bf16" not in peak:
        faster = f"fp16's are up to {peak['fp16'] / peak['fp32']:.0f} times as fast"
        edits.append(f"  training.fp16 for bf16: {plan.facts.machine.name} has no units for bf16's products; {faster}")
    return edits


def refuse_impossible(plan: Plan) -> None:
    """Raise TooLargeError if the training state, or reserved host memory, alone is larger than the memory there is.

    Both are exact. What forward saves on the device is an estimate, so it does not refuse a run.
    """
    _refuse_larger(plan, Tier.DEVICE, plan.facts.machine.device_bytes)
    _refuse_larger(plan, Tier.HOST, plan.facts.machine.host_bytes)


def _refuse_larger(plan: Plan, tier: Tier, has: int) -> None:
    hosted = plan.hosted_bytes() if tier is Tier.HOST else 0  # part of the arena if there is one
    needed = plan.states(tier) + hosted if plan.addresses is None else plan.addresses.num_bytes(tier)
    if needed > has:
        sent = hosted and needed - hosted <= has
        cure = "; write strategies.recompute.activation_offloading: false" if sent else ""
        who = "the training state and the tensors saved for backward need" if hosted else "the training state needs"
        what = f"{who} {human(needed)} on each rank's {tier.value}, which has {human(has)}"
        line = f"{what}: {human(needed - has)} too much{cure}"
        raise TooLargeError(lambda: line, tier.value, lambda: needed, has)
