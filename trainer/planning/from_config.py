"""From a config to a plan: what ``launch/plan.py`` does and nothing else, so that planning loads no trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.compose import compose, needs_of, with_implied
from strategies.core.plan import Conflict, Home, Plan
from strategies.core.protocol import Need, Refusal
from strategies.core.sizes import human
from trainer.errors import ConfigError
from trainer.machine import block_timing, gemm_cache
from trainer.model import build
from trainer.model.shrink import PER_LAYER
from trainer.planning import facts

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine


def plan_of(
    config: RunConfig,
    ranks: Ranks,
    machine: Machine,
    *,
    resumes: bool = False,
    tune: bool = False,
    say: Callable[[str], None] = print,
) -> Plan:
    """The plan of a run.

    Block times that an earlier run in the same folder measured are used, on one machine; a run that ``resumes`` is
    planned with those it began with.

    Args:
        tune: measure the products of linear layers, where a strategy wants to know and nobody has measured them yet.

    Raises:
        ConfigError: strategies conflict, or one cannot work with these facts.
    """
    known = facts.gather(config, ranks.world_size, ranks.local_world_size, machine)
    if known.linears:
        known = gemm_cache.for_config(config, known, ranks, machine, tune=tune, say=say)
    if Need.BLOCK_TIMES in needs_of(config.strategies) and ranks.world_size == ranks.local_world_size:
        folder = Path(config.training.output_dir)
        known = replace(known, unit_times=block_timing.read(folder, known, "unit_times" if resumes else "measured"))
    try:
        plan = compose(config.strategies, known)
    except (Conflict, Refusal) as refused:
        raise _located(config, refused) from None
    _refuse_compiled(config, plan)
    return plan


def _located(config: RunConfig, refused: Conflict | Refusal) -> ConfigError:
    """The error of a strategy as one line that begins with file and line of its key, as every error of a config."""
    if isinstance(refused, Conflict):
        return ConfigError(config.located(f"strategies.{refused.second}", str(refused)))
    return config.error(refused.key, refused.value, refused.cure)


def check_installed(config: RunConfig) -> None:
    """Check that the strategies of ``config`` work with the packages that are installed here.

    Raises:
        ConfigError: one does not.
    """
    try:
        for strategy in with_implied(config.strategies).values():
            strategy.check_installed()
    except Refusal as refused:
        raise _located(config, refused) from None


def _refuse_compiled(config: RunConfig, plan: Plan) -> None:
    """A compiled graph keeps the shapes and strides of the weights that it met; one that is away has none of its own.

    Raises:
        ConfigError: weights travel, and the model is to be compiled.
    """
    keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    key = next((key for key in keys if getattr(config.training, key)), None)
    travels = plan.layout is not None and not all(bucket.resident for bucket in plan.layout.buckets)
    if key is not None and travels:
        what = (
            "weights travel in this plan, which compiled code does not allow; leave it out, or write "
            "strategies.offload.weights: resident"
        )
        raise config.error(f"training.{key}", getattr(config.training, key), what)


def measure(config: RunConfig, ranks: Ranks, machine: Machine, say: Callable[[str], None]) -> Iterator[str]:
    """Time a few blocks of the configured model on this machine and keep that in the run folder; lines for people.

    Raises:
        ConfigError: there is no plan that would use it, the folder cannot be written, the model cannot be built, or
            nothing could be measured.
    """
    if Need.BLOCK_TIMES not in needs_of(config.strategies):
        raise ConfigError("--measure: block times are for strategies.offload, which is not on")
    plan_of(config, ranks, machine)  # what cannot be planned need not be measured
    folder = Path(config.training.output_dir)
    refuse_folder(config)
    known = facts.gather(config, ranks.world_size, ranks.local_world_size, machine)

    def make(blocks: int) -> Any:
        section = config.model
        hf_config = build.load_config(section, facts.vocab_size_of(config))
        text = hf_config.get_text_config()
        text.num_hidden_layers = blocks
        for name in PER_LAYER:
            if getattr(text, name, None):
                setattr(text, name, getattr(text, name)[:blocks])
        # Of the same shape, without its weights.
        fresh = section.model_copy(update={"name_or_path": None, "config": {"model_type": hf_config.model_type}})
        return build.build(fresh, hf_config, seed=config.training.seed, partitioned=False)

    found = block_timing.measure(make, known, machine.device_kind, say)
    if found is None:
        raise ConfigError("--measure: backward did not pass through the blocks; is anything trained?")
    block_timing.store(folder, known, found)
    yield f"measured, and kept in {folder / block_timing.FILE}:"
    yield from block_timing.lines(known, found)


def refuse_folder(config: RunConfig) -> None:
    """Check that the run folder is there or can be made. It is not made: a run may still be refused.

    Raises:
        ConfigError: it is a file, or lies in one, or may not be written.
    """
    folder = Path(config.training.output_dir)
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = "may not be written" if nearest.is_dir() else "is a file"
        what = f"{nearest} {why}; name another folder"
        raise config.error("training.output_dir", config.training.output_dir, what)


def refuse_impossible(plan: Plan) -> None:
    """The training state is certain, and so are places on the host; what is saved on the device is an estimate. Only
    what is certain ends a run.

    Raises:
        ConfigError: that alone is larger than the memory there is.
    """
    machine = plan.facts.machine
    for home, has in ((Home.DEVICE, machine.device_bytes), (Home.HOST, machine.host_bytes)):
        waiting = plan.hosted_bytes() if home is Home.HOST else 0  # reserved; in the arena where there is one
        needs = plan.states(home) if plan.addresses is None else plan.addresses.num_bytes(home) - waiting
        if needs + waiting > has:
            split = "more ranks, a higher strategies.zero.stage, " if plan.addresses is None else ""
            cures = f"use {split}training.bf16, or model.lora"
            who = "the training state needs"
            if waiting:
                who = "the training state and what waits for backward need"
                cures = "write strategies.recompute.activation_offloading: false" if needs <= has else cures
            needs += waiting
            raise ConfigError(
                f"{who} {human(needs)} on each rank's {home.value}, which has {human(has)}: "
                f"{human(needs - has)} too much; {cures}"
            )
