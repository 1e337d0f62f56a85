"""``training.live``: what ``deepstow watch`` shows in another terminal, in the lowest rows of the run's own.

The terminal itself is told to scroll above these rows only. So lines stay where they were, above the screen and in the
terminal's history, whoever prints them: this rank, others, C++, a launcher. (rich and tqdm move the lines of their own
process, and would draw over the traceback of another rank.)

Invariant. The rows are given back before anything is said about the end: after training, an error or Ctrl-C, when the
run is asked to stop, and before a thread ends the process. Only a process that is killed leaves the terminal as it is.

Not drawn, and said in a line: where standard output is no terminal, as behind a pipe, or one without rows to spare.
Drawing takes at most a hundredth of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import write_line
from deepstow.trainer.run import screen
from deepstow.trainer.run.history import History

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

EVERY_S, SHARE = 1.0, 0.01
FEWEST = 6  # rows that stay for lines, and rows that the screen takes at least
SAVE, BACK = "\x1b7", "\x1b8"  # the place of the cursor
FREE = f"{SAVE}\x1b[r{BACK}\x1b[J"  # the whole terminal scrolls; what is below the cursor is erased


class LowestRows:
    """The lowest rows of the ``terminal``, a file descriptor; they are taken by the first ``draw``."""

    def __init__(self, terminal: int = 1) -> None:
        self._terminal = terminal
        self._size = os.terminal_size((0, 0))
        self._taken = 0
        self._closed = False

    def refusal(self) -> str | None:
        """Why nothing can be drawn; None if it can."""
        if not os.isatty(self._terminal):
            return "standard output is no terminal"
        if os.environ.get("TERM", "dumb") == "dumb":
            return "the terminal cannot keep rows apart (TERM)"
        columns, rows = os.get_terminal_size(self._terminal)
        return f"the terminal has {rows} rows, and 12 are needed" if rows < 2 * FEWEST or not columns else None

    def draw(self, lines: Callable[[int], Iterable[str]]) -> None:
        """Show what ``lines`` says for a number of columns, below a rule, as far as there is room. Raises OSError."""
        if self._closed:
            return
        size, said = os.get_terminal_size(self._terminal), ""
        if size != self._size:  # a terminal of another size scrolls as a whole again
            said, self._size, self._taken = FREE, size, 0
        shown = ["─" * size.columns, *lines(size.columns)][: max(0, size.lines - FEWEST)]
        if more := max(0, len(shown) - self._taken):  # lines that are there move up
            said += "\x1bD" * more + f"\x1b[{more}A"
            self._taken += more
        if self._taken:
            top = size.lines - self._taken
            shown += [""] * (self._taken - len(shown))
            rows = "".join(f"\x1b[{top + at};1H\x1b[2K{line}" for at, line in enumerate(shown, start=1))
            said += f"{SAVE}\x1b[1;{top}r\x1b[?7l{rows}\x1b[?7h{BACK}"  # ?7: what is too long is cut
        self._write(said)

    def close(self) -> None:
        """Give the rows back; from any thread, once."""
        closed, self._closed = self._closed, True
        if self._taken and not closed:
            with suppress(OSError):
                self._write(FREE)

    def _write(self, text: str) -> None:
        left = text.encode(errors="replace")  # past Python's streams, which the thread that was ended may have locked
        while left:
            left = left[os.write(self._terminal, left) :]


class Live(TrainerCallback):
    """Draws the run in ``folder`` when there is news, from the Trainer's own records, which a resumed run has, too."""

    def __init__(self, folder: Path, rows: LowestRows) -> None:
        self._folder, self._rows, self._next_s = folder, rows, 0.0

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if (began_s := time.monotonic()) < self._next_s:
            return
        run = History(self._folder, {}, state.log_history)
        with suppress(OSError):
            self._rows.draw(lambda columns: screen.lines(run, columns, state.global_step, state.max_steps or None))
        self._next_s = time.monotonic() + max(EVERY_S, (time.monotonic() - began_s) / SHARE)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._rows.close()

    on_train_begin = on_log = on_step_end


def view(config: RunConfig, ranks: Ranks, ended: ExitFile) -> list[Live]:
    """The callback that draws, on the first rank of a run that asks for it; none where it cannot, which is said."""
    if not config.training.live or not ranks.is_first:
        return []
    rows, folder = LowestRows(), Path(config.training.output_dir)
    if why := rows.refusal():
        write_line(f"training.live: {why}; in another terminal: deepstow watch {folder}")
        return []
    ended.before = rows.close
    return [Live(folder, rows)]
