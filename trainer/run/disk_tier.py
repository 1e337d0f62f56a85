"""The folder of ``strategies.offload.disk``: refused before data are read, or before a weight is loaded.

What is wrong with the folder itself is known at once; whether it has room, when the plan says how much is needed. Then
so much is reserved there for a moment, as the engine does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strategies.core.layout import disk_bytes
from strategies.engine.memory.scratch_file import ScratchFile, unsuitable

if TYPE_CHECKING:
    from strategies.core.plan import Plan
    from trainer.config.sections import RunConfig

KEY = "strategies.offload.disk"


def refuse_folder(config: RunConfig) -> None:
    """Raise ConfigError if the folder cannot have such a file, whatever its size is."""
    folder = _folder(config)
    if folder is not None and (said := unsuitable(Path(folder))):
        raise config.error(KEY, folder, said)


def refuse_without_room(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError if the folder has no room for the state that ``plan`` puts there, or no direct access."""
    folder = _folder(config)
    if folder is None or plan.layout is None or not (needed := disk_bytes(plan.layout)):
        return
    try:
        ScratchFile(folder, needed).close()
    except ValueError as error:
        raise config.error(KEY, folder, str(error)) from None


def _folder(config: RunConfig) -> str | None:
    given = config.strategies.get("offload")
    found: str | None = given.model_dump()["disk"] if given is not None else None
    return found
