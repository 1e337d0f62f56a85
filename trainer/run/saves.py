"""Saves that find no space: one line, and the run goes on to the next save.

Problem. A checkpoint is many times the size of the model, and disks fill up. Then safetensors raises an error of its
own, torch one about streams, and the run is lost with all that is not saved.

So the space is looked at before training, where the plan says how much a checkpoint takes, and before each save but the
first, which needs as much as the one before. A disk that fills up during a save is an ``OSError`` on every rank
(``trainer/run/saving.py``), whatever library met it. In both cases nothing but the line remains of the save, the
earlier checkpoints are as they were, and the next save tries again.

Refused: nothing. A run that was asked to stop and cannot save ends with exit code 14.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from strategies.core.plan import Kind, Plan
from strategies.core.sizes import human


class Saves:
    """What is known about this run's saves: the step of the newest that succeeded, and how much it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = ""  # name of the newest checkpoint of this run
        self.num_bytes = 0

    def succeeded(self, checkpoint: Path) -> None:
        """Note a save; the next one will take as much."""
        self.newest = checkpoint.name
        with suppress(OSError):  # it is saved, whatever cannot be looked at
            self.num_bytes = size_of(checkpoint)

    def shortage(self, estimate: int = 0) -> str | None:
        """Why no checkpoint fits now; None if one does, or if its size is not known."""
        needed = self.num_bytes or estimate
        try:
            free = shutil.disk_usage(nearest(self.folder)).free
        except OSError:
            return None
        if free >= needed:
            return None
        return f"a checkpoint takes about {human(needed)}, and the disk of {self.folder} has {human(free)} free"


def estimated_bytes(plan: Plan, *, adapters: bool) -> int:
    """What a checkpoint of this plan takes: weights (of adapters alone, if there are), and the optimizer's state.

    Where layers are divided over ranks, what is not divided counts for each of them, so it is rather too much. A stage
    stands for as much of the model as it has parameters of it.
    """
    facts = plan.facts
    times = facts.run.tensor if facts.cut is None else facts.run.model_params / facts.num_params

    def over_ranks(kind: Kind) -> int:
        mine = sum(plan.num_bytes(unit.name, kind) * plan.share(unit.name, kind).ways for unit in facts.units)
        return int(times * mine)

    weights = facts.num_trainable * 4 if adapters else over_ranks(Kind.PARAM)
    return weights + over_ranks(Kind.MASTER) + over_ranks(Kind.MOMENT)


def nearest(folder: Path) -> Path:
    """The folder itself, or what exists of the path to it."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def size_of(folder: Path) -> int:
    """Bytes of all files in ``folder``; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
