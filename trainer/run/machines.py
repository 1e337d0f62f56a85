"""The machines of a job: what cannot work on them is refused, before a weight is loaded.

Every rank makes the plans itself, and all must make the same ones: buckets that differ would be exchanged as if they
were one. Memory that is free changes from moment to moment, so all plan with the least that any of them found.

Folders of state that rests on disks need room for it, as much as the plan says. So much, for all ranks of a machine, is
reserved there for a moment, as the engine does it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.strategies.core.on_disk import file_bytes, folder_of
from deepstow.strategies.core.protocol import KnowsMachines
from deepstow.strategies.engine.memory.tiers import Striped
from deepstow.trainer.distributed.agreement import agreement
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.profiles import stored_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.distributed.ranks import Ranks
    from deepstow.trainer.machine.probe import Machine

KEY = "strategies.offload.disk"
TIMEOUT_S = 1800


def refuse(config: RunConfig, ranks: Ranks) -> None:
    """Raise ConfigError, on all ranks, for a strategy that cannot work on these machines; a collective."""
    if ranks.is_local:
        return
    with agreement(ranks, TIMEOUT_S) as together:
        firsts = together.gathered(ranks.rank - ranks.local_rank)
    for strategy in (strategy for strategy in config.strategies.values() if isinstance(strategy, KnowsMachines)):
        for refused in strategy.refuses_machines(firsts):
            raise config.error(refused.key, refused.value, refused.cure)


def agreed(ranks: Ranks, machine: Machine) -> Machine:
    """``machine`` with the least memory that any rank found on its own; a collective."""
    with agreement(ranks, TIMEOUT_S) as together:
        memory_bytes = (machine.host_available_bytes, machine.host_own_bytes, machine.device_total_bytes)
        host_bytes, own_bytes, device_bytes = map(min, zip(*together.gathered(memory_bytes), strict=True))
    return replace(machine, host_available_bytes=host_bytes, host_own_bytes=own_bytes, device_total_bytes=device_bytes)


def refuse_other_plans(ranks: Ranks, plans: Sequence[Plan]) -> None:
    """Raise ConfigError, on all ranks, if they would carry out plans that differ, whatever that comes from: in buckets,
    or in blocks that run again in backward, and exchange again; a collective.
    """
    keeps = [plan.keep(unit.name) for plan in plans for unit in plan.facts.units]
    plan_text = repr(([plan.layout for plan in plans], [(keep.policy, keep.kept, keep.hosted) for keep in keeps]))
    with agreement(ranks, TIMEOUT_S) as together:
        digests = together.gathered(hashlib.sha256(plan_text.encode()).hexdigest())
    outlier = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if outlier is not None:
        raise ConfigError(
            f"rank {outlier} makes another plan than rank 0: their machines have other devices or measured rates; give "
            f"all the same rates ({stored_at()}), or set strategies.offload.site, weights and gradients yourself"
        )


def refuse_without_room(config: RunConfig, ranks: Ranks, plan: Plan, say: Callable[[str], None]) -> None:
    """Raise ConfigError, on all ranks, if a folder of a machine has no room for the state that plans of its ranks put
    there, or no direct access; a collective. Say so if a file system has several folders, which the plan does not know.
    """
    if plan.layout is None or not plan.layout.disk:  # as on all ranks
        return
    folders, machine = plan.layout.disk, ranks.rank - ranks.local_rank

    def reserve(num_bytes: int) -> None:
        try:
            Striped(folders, num_bytes).close()
        except ValueError as error:
            raise config.error(KEY, ", ".join(folders), str(error)) from None

    with agreement(ranks, TIMEOUT_S) as together:
        needed = together.gathered((machine, file_bytes(plan.layout)))
        machine_bytes = sum(num_bytes for first, num_bytes in needed if first == machine)
        together.by_some(ranks.is_first_local, lambda: reserve(machine_bytes) if machine_bytes else None)
    rates, named = plan.facts.machine.rates, ", ".join(folders)
    if machine_bytes and rates is not None and rates.disk_folder != named:
        on_drives = [folder for folder in map(folder_of, folders) if Path(folder).is_dir()]
        systems = len({Path(folder).stat().st_dev for folder in on_drives})
        if systems < len(on_drives):
            say(
                f"{KEY} = {named}: on {systems} file system(s), and the plan adds up the speed of {len(folders)} drives"
            )
