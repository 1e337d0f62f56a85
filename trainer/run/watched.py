"""What the watchdog of this rank says that the rank does, and the run's timeout for groups that libraries have made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from trainer.dist.ranks import limit_groups

if TYPE_CHECKING:
    from trainer.dist.watchdog import Watchdog


class Watched(TrainerCallback):
    """Notes where the rank is. The last callback, so that what follows an event is what it says."""

    def __init__(self, watchdog: Watchdog | None, timeout_s: int) -> None:
        self._watchdog, self._timeout_s = watchdog, timeout_s

    def _note(self, doing: str) -> None:
        if self._watchdog is not None:
            self._watchdog.doing = doing

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        limit_groups(self._timeout_s)
        self._note(f"at the beginning of training, after step {state.global_step}")

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._note(f"in step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._note(
            f"saving or evaluating after step {state.global_step}"
            if _pauses(control)
            else f"after step {state.global_step}"
        )

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._note(f"evaluating after step {state.global_step}")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._note("at the end of training, exporting")


def _pauses(control: Any) -> bool:
    return bool(control.should_save or control.should_evaluate)
