"""The trainer of ``launch/train.py``: it trains nothing beyond the last step, and it outlives a full disk.

* A run that is resumed at its last step takes no further one. Hugging Face counts whole epochs, so it would begin one
  more wherever the last step is not the end of an epoch, and look at the number of steps after the first of them.
* A save that finds no space is one line (``trainer/run/saves.py``). Every rank skips it, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.dist.agreement import Agreement
from trainer.run.callbacks import write_line
from trainer.run.saves import Saves
from trainer.run.saving import NotSaved
from trainer.run.trainer import Trainer

if TYPE_CHECKING:
    import torch


class JobTrainer(Trainer):
    """``Trainer`` as one rank of a job.

    Args:
        together: decides with the other ranks.
    """

    def __init__(self, *args: Any, together: Agreement, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.together = together
        self.saves = Saves(Path(str(self.args.output_dir)))
        self.is_stopping = False  # the ranks have agreed to save and to end
        self._trained = False

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As Hugging Face's; nothing if the last step was taken before this epoch."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As Hugging Face's; with ``save_strategy: best`` its answer decides about a save, which a stop needs."""
        return bool(super()._determine_best_metric(metrics, trial)) or self.is_stopping

    def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        """As ever; no record of a training that did not take place."""
        if self._trained or "train_loss" not in logs:
            super().log(logs, *rest, **more)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._trained = True
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.settle()
        step, first = self.state.global_step, self.args.process_index == 0
        missing = self.saves.shortage() if first else None
        if self.together.any(missing is not None):
            if first:
                write_line(f"step {step}: no checkpoint was saved: {missing}; the next save tries again")
            return
        with self._lasting():
            super()._save_checkpoint(model, trial)

    def settle(self) -> None:
        """As ever, but a save that failed is one line."""
        save = self._saving
        with self._lasting():
            super().settle()
            if save is not None:
                self.saves.succeeded(save.folder)

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        """The run goes on if the block cannot save."""
        try:
            yield
        except NotSaved as error:
            if self.args.process_index == 0:
                write_line(f"{error}; the next save tries again")
