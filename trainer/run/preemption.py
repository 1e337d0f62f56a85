"""A run that was asked to stop saves at the end of the step, on all ranks together, and ends with exit code 10.

A signal reaches one rank, or several at different moments, and a rank that saved on its own would wait for the others
in the collectives of saving. So the ranks agree at the end of every step (``trainer/dist/agreement.py``; nothing is
sent with one rank), which every rank passes. They agree again after an evaluation and after a save, which take long: a
request that came during a save ends the run right after it.

Invariant. ``Stopped`` is raised on all ranks or on none, after every rank has left the save. The checkpoint is an
ordinary one, so the resumed run ends with the bits of one that nobody stopped; an evaluation that is due at this step
is made before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from trainer.dist.agreement import Agreement
from trainer.dist.stopping import Phase, Stop, Stopped
from trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from trainer.run.trainer import Trainer


class StoppedUnsaved(UserError):
    """The run was asked to stop, and the checkpoint could not be written."""

    code = ExitCode.DISK


class SaveAndStop(TrainerCallback):
    """Asks for a save when a rank was asked to stop, and ends the run after it."""

    def __init__(self, stop: Stop, together: Agreement, trainer: Trainer) -> None:
        self._stop, self._together, self._trainer = stop, together, trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._stop.phase = Phase.TRAINING

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer.is_stopping = trainer.is_stopping or self._together.any(self._stop.is_asked)
        if trainer.is_stopping:
            control.should_save = True
            if args.save_strategy == SaveStrategy.BEST:  # else an evaluation that is not the best would cancel the save
                args.save_strategy = SaveStrategy.STEPS

    on_evaluate = on_step_end

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Also what makes every rank wait for the first one, which is the last to leave a save.
        trainer = self._trainer
        trainer.is_stopping = self._together.any(self._stop.is_asked or trainer.is_stopping)
        if not trainer.is_stopping:
            return
        why = _why(self._together.gathered(self._stop.reason))
        step = state.global_step
        trainer.settle()
        if trainer.newest != f"checkpoint-{step}":
            raise StoppedUnsaved(f"{why}: ended at step {step}, which could not be saved")
        raise Stopped(
            f"{why}: step {step} is saved, the run ends; training.resume_from_checkpoint=auto goes on from there"
        )


def _why(reasons: list[str | None]) -> str:
    """What asked which rank to stop."""
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    alone = len(reasons) == 1 or all(each == reason for each in reasons)
    return reason if alone else f"{reason} on rank {rank}"
