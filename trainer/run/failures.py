"""How a run ends by an error: what is said of it, and its exit code. The one place where a run catches errors."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.distributed import DistError

from deepstow.strategies.engine.layers_first import LayersRefusedError
from deepstow.strategies.engine.memory.scratch_file import DiskError
from deepstow.trainer.distributed.ranks import GRACE_S, Ranks
from deepstow.trainer.distributed.stopping import Phase, Stop, Stopped
from deepstow.trainer.errors import ExitCode, UserError, first_line, report, write_line
from deepstow.trainer.registry import Raised
from deepstow.trainer.run import loading, oom
from deepstow.trainer.run.callbacks import trackers
from deepstow.trainer.run.checkpoints import disk
from deepstow.trainer.run.checkpoints.checkpoint import GOES_ON

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.distributed.watchdog import Watchdog

TIMEOUT_SAYS = ("Timed out waiting", "Application timeout")  # gloo
GLOO_SAYS = ("gloo/transport", *TIMEOUT_SAYS)
REPORT_S = 120.0  # how long the first rank may take to say what would fit, before the others end by themselves


# Who knows an error of libraries or machines: its exit code, and the line that is said in place of a traceback. The
# first that knows it says so.
KNOWN: Sequence[Callable[[Exception, RunConfig], tuple[ExitCode, str] | None]] = (
    lambda error, config: loading.explained(error),
    lambda error, config: (ExitCode.CONFIG, str(error)) if isinstance(error, LayersRefusedError) else None,
    lambda error, config: (ExitCode.DISK, f"{error}; {GOES_ON}") if isinstance(error, DiskError) else None,
    disk.explained,
)


def timeout_s(config: RunConfig) -> int:
    """How long a collective, or a sign of life, may be waited for."""
    return config.training.ddp_timeout or 1800


def say_end(code: int, stop: Stop) -> None:
    """Tell those who wait for it how the run has ended, at once: a launcher may kill while the groups are closed."""
    stop.ended.write(code)
    trackers.end(code)


def while_meeting(error: DistError, ranks: Ranks) -> ExitCode:
    """The exit code of a run whose process group cannot be opened or closed, after it was said."""
    write_line(f"rank {ranks.rank}: another rank has ended while the ranks met: {first_line(error)}", sys.stderr)
    return ExitCode.PEER_DIED


def ended(
    error: Exception | Stopped,
    config: RunConfig,
    plan: Plan | None,
    ranks: Ranks,
    stop: Stop,
    watchdog: Watchdog | None,
) -> ExitCode:
    """The exit code of an error, after it was said, while the process group is open. ``plan``: None before there is
    one.

    A traceback refers to its frames, the frames to the engine, and the engine to its groups, so the frames are cleared
    before the groups are closed (see [Note: closing gloo] in ``trainer/distributed/ranks.py``).
    """
    if isinstance(error, UserError | Stopped):
        code = error.code
        say_end(code, stop)
        stop.leave()
        _say(error, ranks, stop)
    else:
        code = _failed(error, config, plan, stop, watchdog)
    traceback.clear_frames(error.__traceback__)
    return code


def _say(error: UserError | Stopped, ranks: Ranks, stop: Stop) -> None:
    """Say an end that somebody has asked for or can mend."""
    if isinstance(error, Raised) and ranks.world_size > 1:  # on this rank; others may not have
        write_line(f"rank {ranks.rank}: {error}", sys.stderr)
    elif isinstance(error, UserError):
        if ranks.is_first:
            report(error)
        elif error.says_more:  # a launcher ends all ranks when one has ended, and the first one still reports
            time.sleep(REPORT_S)
    elif ranks.is_first or (stop.phase is not Phase.TRAINING and error.code is not ExitCode.INTERRUPTED):
        write_line(error.line, sys.stderr)  # Ctrl-C comes to all of a terminal


def _failed(error: Exception, config: RunConfig, plan: Plan | None, stop: Stop, watchdog: Watchdog | None) -> ExitCode:
    """The exit code of an error that is not the user's, after it was printed."""
    code = ExitCode.FAILED
    shown = True
    asked_before = stop.is_asked
    if explained := next(filter(None, (knows(error, config) for knows in KNOWN)), None):
        code, shown = explained[0], False
        write_line(explained[1], sys.stderr)
    if plan is not None and oom.is_shortage(error):
        write_line("\n".join(oom.explain(config, plan, error)), sys.stderr)
        code = ExitCode.OUT_OF_MEMORY
    if isinstance(error, DistError) or any(words in str(error) for words in GLOO_SAYS):
        if watchdog is not None and any(words in str(error) for words in TIMEOUT_SAYS):
            where = "".join(traceback.format_exception(error))
            watchdog.tell(f"a collective has waited for {timeout_s(config)} s (training.ddp_timeout)", where)
        # The rank that failed first reports why, and the launcher ends this one, unless that rank was killed.
        stop.wait(GRACE_S)
        code, shown = ExitCode.PEER_DIED, asked_before or not stop.is_asked
        if shown and stop.phase is Phase.ENDING:
            line = f"rank {stop.ended.rank}: another rank has ended before the run was over; start it again"
            write_line(line, sys.stderr)
            shown = False
    say_end(code, stop)
    stop.leave()
    if shown:
        traceback.print_exception(error)
    return code
