"""Whether the folder of state that rests on a disk has room for it, known when the plan says how much is needed.

So much is reserved there for a moment, as the engine does it, before a weight is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies.core.on_disk import disk_bytes
from strategies.engine.memory.scratch_file import ScratchFile

if TYPE_CHECKING:
    from strategies.core.plan import Plan
    from trainer.config.sections import RunConfig

KEY = "strategies.offload.disk"


def refuse_without_room(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError if the folder has no room for the state that ``plan`` puts there, or no direct access."""
    if plan.layout is None or not (needed := disk_bytes(plan.layout)):
        return
    try:
        ScratchFile(plan.layout.disk, needed).close()
    except ValueError as error:
        raise config.error(KEY, plan.layout.disk, str(error)) from None
