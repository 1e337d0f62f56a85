"""What a run does to its folder before its first step: all of it here, in this order, after the last refusal.

    what a kill has left is deleted -> what the run does not go on with is set aside -> plan, config, facts are written

A run may be refused until its weights, and the state of the checkpoint that it resumes, are where they train. Until
then it leaves what an earlier run has made as it is, but for ``exit.json``. Moves that an earlier start had begun and a
kill has cut short are completed before checkpoints are looked at (``checkpoints/resuming.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.errors import DiskFails
from deepstow.trainer.machine import block_timing
from deepstow.trainer.run import inputs
from deepstow.trainer.run.checkpoints import checkpoint, earlier

if TYPE_CHECKING:
    from deepstow.trainer.distributed.agreement import Agreement
    from deepstow.trainer.run.session import Session


class Begin(TrainerCallback):
    """The callback after the one that loads the checkpoint: nothing is left that could refuse the run."""

    def __init__(self, session: Session, together: Agreement) -> None:
        self._session, self._together = session, together

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for line in self._together.on_first(self._write):
            self._session.say(line)

    def _write(self) -> list[str]:
        session = self._session
        try:
            inputs.refuse_exchanged(session.config, session.resumed, session.weights)
            checkpoint.clear(session.folder)
            lines = list(earlier.set_aside(session.config, session.resumed.found if session.resumed else None))
            for name, content in (session.files or {}).items():
                done = "\n".join(["", "done:", *session.applied, ""]) if name == "plan.txt" and session.applied else ""
                replace_file(session.folder / name, content + done)
            block_timing.store(session.folder, session.plan.facts)
        except OSError as error:
            raise DiskFails(f"{session.folder}: the run cannot begin, nothing was trained: {error}") from None
        return lines
