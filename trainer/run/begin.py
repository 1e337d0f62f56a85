"""What a run does to its folder before its first step: all of it here, in this order, after the last refusal.

    what a kill has left is deleted -> what the run does not go on with is set aside -> plan, config, facts are written

A run may be refused until its weights, and the state of the checkpoint that it resumes, are where they train. Until
then it leaves everything of an earlier run as it is. The one exception are moves that an earlier start had begun and
a kill has cut short: those are completed before checkpoints are looked at (``resuming.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.machine import block_timing
from deepstow.trainer.run import checkpoint, earlier, inputs
from deepstow.trainer.run.earlier import CannotBegin

if TYPE_CHECKING:
    from deepstow.trainer.distributed.agreement import Agreement
    from deepstow.trainer.run.order import Run


class Begin(TrainerCallback):
    """The first callback: Hugging Face calls it when nothing is left that could refuse the run."""

    def __init__(self, run: Run, together: Agreement) -> None:
        self._run, self._together = run, together

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for line in self._together.on_first(self._run.ranks.rank, self._write):
            self._run.say(line)

    def _write(self) -> list[str]:
        run = self._run
        try:
            inputs.refuse_exchanged(run.config, run.resumed, run.weights)
            checkpoint.clear(run.folder)
            lines = list(earlier.set_aside(run.config, run.resumed.found if run.resumed else None))
            for name, content in (run.files or {}).items():
                done = "\n".join(["", "done:", *run.applied, ""]) if name == "plan.txt" and run.applied else ""
                replace_file(run.folder / name, content + done)
            block_timing.store(run.folder, run.plan.facts)
        except OSError as error:
            raise CannotBegin(f"{run.folder}: the run cannot begin, nothing was trained: {error}") from None
        return lines
