"""A run that is over stays as it is.

A restart script starts a run until it ends well. Started once more after that, a run would take another step, write a
checkpoint beyond its last and replace its export. So the export's manifest (``strategies/core/sealed.py``) holds the
step, and size and hash of every file, and a run that is resumed at or after its last step looks at that first. If the
export is whole and of that step, the run says so and ends with exit code 0. If it is missing or damaged, it alone is
made again, from the checkpoint and without a step of training, so with the bits that it would have had.

Invariant. Nothing that a run has finished is replaced: an export of another step, or a damaged one, moves to
``earlier-N`` before the new one is written, unless ``training.overwrite`` is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.sealed import Damaged, damage, read
from trainer.errors import write_line
from trainer.run.checkpoint import move_aside

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

KIND = "export"  # in its manifest


def about(config: RunConfig, step: int) -> dict[str, Any]:
    """What an export says about itself: its step, and what decided that it is the last one."""
    training = config.training
    return {
        "step": step,
        "max_steps": training.max_steps,
        "num_train_epochs": training.num_train_epochs,
        "load_best_model_at_end": bool(training.load_best_model_at_end),
    }


def export_of(folder: Path) -> Mapping[str, Any] | None:
    """What the export in ``folder`` says about itself; None if there is none, or it is not whole. Reads every byte."""
    try:
        sealed = read(folder, KIND)
    except Damaged:
        return None
    return None if damage(folder, sealed) else sealed.about


def already(config: RunConfig, step: int | None) -> str | None:
    """The line of a run that is over, its export whole; None if something is left to do.

    Args:
        step: of the checkpoint that would be resumed; None: none would.
    """
    limit, folder = config.training.max_steps, Path(config.training.output_dir) / "export"
    if step is None or (limit >= 0 and step < limit) or export_of(folder) != about(config, step):
        return None
    return line(folder, step)


def line(folder: Path, step: int) -> str:
    """That nothing was left to do."""
    return f"finished before, at step {step}: {folder} is whole and of that step; nothing was changed"


def make_room(config: RunConfig, wanted: Mapping[str, Any]) -> bool:
    """Whether the export is whole and says ``wanted``; if not, what is there moves aside.

    Raises:
        OSError: it cannot be moved.
    """
    output_dir = Path(config.training.output_dir)
    folder = output_dir / "export"
    if not folder.exists():
        return False
    if export_of(folder) == wanted:
        return True
    if (earlier := move_aside([folder], output_dir, overwrite=config.training.overwrite)) is not None:
        write_line(f"the export of before is now in {earlier}")
    return False
