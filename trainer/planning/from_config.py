"""From a config to a plan: what ``launch/plan.py`` does and nothing else, so that planning loads no trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.compose import compose
from strategies.core.plan import Conflict, Home, Plan
from strategies.core.protocol import Refusal
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
    if "offload" in config.strategies and ranks.world_size == ranks.local_world_size:
        folder = Path(config.training.output_dir)
        known = replace(known, unit_times=block_timing.read(folder, known, "unit_times" if resumes else "measured"))
    try:
        plan = compose(config.strategies, known)
    except (Conflict, Refusal) as refused:
        raise ConfigError(str(refused)) from None
    _refuse_compiled(config, plan)
    return plan


def _refuse_compiled(config: RunConfig, plan: Plan) -> None:
    """A compiled graph keeps the shapes and strides of the weights that it met; one that is away has none of its own.

    Raises:
        ConfigError: weights travel, and the model is to be compiled.
    """
    keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    key = next((key for key in keys if getattr(config.training, key)), None)
    travels = plan.layout is not None and not all(bucket.resident for bucket in plan.layout.buckets)
    if key is not None and travels:
        raise ConfigError(
            f"training.{key} = {str(getattr(config.training, key)).lower()}: weights travel in this plan, which "
            f"compiled code does not allow; leave it out, or write strategies.offload.weights: resident"
        )


def measure(config: RunConfig, ranks: Ranks, machine: Machine, say: Callable[[str], None]) -> Iterator[str]:
    """Time a few blocks of the configured model on this machine and keep that in the run folder; lines for people.

    Raises:
        ConfigError: there is no plan that would use it, the folder cannot be written, the model cannot be built, or
            nothing could be measured.
    """
    if "offload" not in config.strategies:
        raise ConfigError("--measure: block times are for strategies.offload, which is not on")
    plan_of(config, ranks, machine)  # what cannot be planned need not be measured
    folder = Path(config.training.output_dir)
    refuse_folder(folder)
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


def refuse_folder(folder: Path) -> None:
    """Nothing, if the run folder is there or can be made. It is not made: a run may still be refused.

    Raises:
        ConfigError: it is a file, or lies in one, or may not be written.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = "may not be written" if nearest.is_dir() else "is a file"
        raise ConfigError(f"training.output_dir = {str(folder)!r}: {nearest} {why}; name another folder")


def refuse_impossible(plan: Plan) -> None:
    """The training state is certain, and so are places on the host; what is saved on the device is an estimate. Only
    what is certain ends a run.

    Raises:
        ConfigError: that alone is larger than the memory there is.
    """
    machine = plan.facts.machine
    for home, has in ((Home.DEVICE, machine.device_bytes), (Home.HOST, machine.host_bytes)):
        needs = plan.states(home) if plan.addresses is None else plan.addresses.num_bytes(home)
        waiting = plan.hosted_bytes() if home is Home.HOST else 0  # reserved
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
