"""Whether the folders of state that rests on disks have room for it, known when the plan says how much is needed.

So much, for all ranks of a machine, is reserved there for a moment, as the engine does it, before a weight is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies.core.on_disk import file_bytes
from strategies.engine.memory.scratch_file import StripedFile
from trainer.dist.agreement import agreement

if TYPE_CHECKING:
    from strategies.core.plan import Plan
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks

KEY = "strategies.offload.disk"
TIMEOUT_S = 1800


def refuse_without_room(config: RunConfig, ranks: Ranks, plan: Plan) -> None:
    """Raise ConfigError, on all ranks, if a folder of a machine has no room for the state that plans of its ranks put
    there, or no direct access; a collective.
    """
    if plan.layout is None or not plan.layout.disk:  # as on all ranks
        return
    folders, machine = plan.layout.disk, ranks.rank - ranks.local_rank

    def reserve(num_bytes: int) -> None:
        try:
            StripedFile(folders, num_bytes).close()
        except ValueError as error:
            raise config.error(KEY, ", ".join(folders), str(error)) from None

    with agreement(ranks, TIMEOUT_S) as together:
        needed = together.gathered((machine, file_bytes(plan.layout)))
        here = sum(num_bytes for first, num_bytes in needed if first == machine)
        together.by_some(ranks.is_first_local, lambda: reserve(here) if here else None)
