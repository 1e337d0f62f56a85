"""Whether a run is over: its export is whole, and was made of the checkpoint that is resumed.

The manifest of an export names checkpoints by their content: the one of the last step, if the run has saved it, and the
one whose weights were taken instead, where the best ones were. Paths and steps would not do: a run that goes back makes
other weights of the same step in the same folder. Of a step that was not saved nothing can be said later, so its export
is never taken for that of another run; nor is one of a release that named no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state import sealed
from deepstow.strategies.state.sealed import Damaged, intact
from deepstow.trainer.run.checkpoints import checkpoint

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.run.checkpoints.checkpoint import Found

KIND, NAME = "export", "export"  # in its manifest, and its folder
OF, BEST = "checkpoint", "best"  # the digests in its manifest
# What decides that a step is the last one, and whose weights are exported.
_DECIDES = """
    max_steps num_train_epochs load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience
    early_stopping_threshold
"""


def about(config: RunConfig, step: int, of: Path | None = None, best: Path | None = None) -> dict[str, Any]:
    """What an export says about itself: its step, what decided that it is the last one, and the digests of the
    checkpoint ``of`` this step and of the ``best`` one, where that has its weights. None: there is no such checkpoint.
    """
    decided = {key: getattr(config.training, key) for key in _DECIDES.split()}
    return {"step": step, **decided, "merged": config.model.merges, OF: _digest(of), BEST: _digest(best)}


def _digest(path: Path | None) -> str | None:
    try:
        return None if path is None else checkpoint.digest(path)
    except Damaged:
        return None


def said_by(export: Path) -> Mapping[str, Any]:
    """What an export says about itself; nothing if it has no manifest that can be read."""
    try:
        return sealed.read(export, KIND).about
    except Damaged:
        return {}


def before(config: RunConfig, found: Found, changed: Mapping[str, str] = {}) -> str | None:
    """The line of a run that is over at the checkpoint that it resumes, its export whole; None if something is left to
    do. ``changed``: rules of keys that differ from the checkpoint's. Takes as long as reading the export.
    """
    folder, step = Path(config.training.output_dir) / NAME, found.step
    # How many steps an epoch has follows from rows and batches. What is honoured otherwise needs a step to be seen.
    if config.training.max_steps <= 0 and any(rule != "said" for rule in changed.values()):
        return None
    expected = about(config, step, found.path)
    del expected[BEST]  # it follows from the evaluations, which the checkpoint has
    if expected[OF] is None or not intact(folder, KIND, expected):
        return None
    return f"finished before, at step {step}: {folder} is whole and of that step; nothing was changed"
