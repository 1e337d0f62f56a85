"""From a config to a plan: what ``launch/plan.py`` does and nothing else, so that planning loads no trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strategies.core.compose import compose
from strategies.core.plan import Conflict, Home, Plan
from strategies.core.protocol import Refusal
from strategies.core.render import human
from trainer import facts, tuning
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.machine import Machine
    from trainer.ranks import Ranks


def plan_of(
    config: RunConfig, ranks: Ranks, machine: Machine, *, tune: bool = False, say: Callable[[str], None] = print
) -> Plan:
    """The plan of a run.

    Args:
        tune: measure what a strategy would like to know of this machine and nobody has measured yet.

    Raises:
        ConfigError: strategies conflict, or one cannot work with these facts.
    """
    known = facts.gather(config, ranks.world_size, ranks.local_world_size, machine)
    if known.linears:
        known = tuning.for_config(config, known, ranks, machine, tune=tune, say=say)
    try:
        return compose(config.strategies, known)
    except (Conflict, Refusal) as refused:
        raise ConfigError(str(refused)) from None


def refuse_impossible(plan: Plan) -> None:
    """The training state is certain; saved tensors are an estimate. Only what is certain ends a run.

    Raises:
        ConfigError: the state alone is larger than the memory there is.
    """
    machine = plan.facts.machine
    for home, has in ((Home.DEVICE, machine.device_bytes), (Home.HOST, machine.host_bytes)):
        needs = plan.states(home) if plan.addresses is None else plan.addresses.num_bytes(home)
        if needs > has:
            split = "more ranks, a higher strategies.zero.stage, " if plan.addresses is None else ""
            cures = f"use {split}training.bf16, or model.lora"
            raise ConfigError(
                f"the training state needs {human(needs)} on each rank's {home.value}, which has {human(has)}: "
                f"{human(needs - has)} too much; {cures}"
            )
