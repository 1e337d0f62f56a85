"""What a resumed run takes over of the Trainer state in its checkpoint, and what not.

Problem. Hugging Face restores the whole state: how often is logged, evaluated and saved, and the path of the best
checkpoint. So another ``training.save_steps`` would change nothing, a best checkpoint that belongs to another run could
change or go at any time, and the bar of one metric would be held against another.

Intervals are those of the config. What was best so far stays the bar if the run goes on in its own folder, and the
metric and its direction are those of before; the best checkpoint is the one of that name there, wherever the folder was
when it was saved. Otherwise it is forgotten, and the log says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from trainer.errors import write_line

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.run.resuming import Resumed

METRIC = ("metric_for_best_model", "greater_is_better")


class TakenOver(TrainerCallback):
    """Mends the state when training begins.

    Args:
        other: why what was best so far is not this run's; empty if it is.
    """

    def __init__(self, other: str) -> None:
        self._other = other

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)
        if state.best_metric is not None and self._other:
            if args.process_index == 0:
                write_line(
                    f"the best evaluation so far, of step {state.best_global_step}, {self._other}: it is forgotten"
                )
            state.best_metric, state.best_model_checkpoint, state.best_global_step = None, None, None
        elif state.best_metric is not None:
            # Hugging Face has dropped the path already if there is no folder any more.
            own = (
                Path(str(args.output_dir))
                / Path(state.best_model_checkpoint or f"checkpoint-{state.best_global_step}").name
            )
            state.best_model_checkpoint = str(own) if own.is_dir() else None


def other(resumed: Resumed | None, config: RunConfig) -> str:
    """Why what was best in the run that saved is not so in this one; empty if it is."""
    if resumed is None:
        return ""
    if resumed.path.parent.resolve() != Path(config.training.output_dir).resolve():
        return "is another run's"
    now, then = (tree.get("training", {}) for tree in (config.tree(), resumed.found.manifest.run.config))
    changed = [name for name in METRIC if now.get(name) != then.get(name)]
    if not changed and any(key.startswith("data.") for key in resumed.changed):
        return "was one of other data"
    return f"was chosen by another {changed[0]}" if changed else ""
