"""Start N ranks on this machine and wait for them: what ``deepstow train --ranks N`` does.

As under ``torchrun --standalone`` each rank is a process of its own, which reads its place in the environment. Two
things differ: the exit code is that of the rank that failed first, and the ranks meet on the loopback interface.

Signals are passed on to every rank, as often as they come. A terminal's Ctrl-C reaches the ranks by itself as well;
they take both for one request (``stopping.py``). Each rank sees this process among its parents, and stops if it dies.
When one rank has failed, the others are asked to end, and are killed ``PATIENCE_S`` later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from deepstow.trainer.distributed.exit_file import FOLLOWS
from deepstow.trainer.distributed.ranks import Ranks, describe
from deepstow.trainer.errors import ConfigError

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LEAST_CORES = 8  # for which ranks without devices are started on any machine
LOOK_S, PATIENCE_S = 0.1, 30.0  # the latter as other launchers have it
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def refuse(num_ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a number of ranks that cannot be started here."""
    if num_ranks < 1:
        raise ConfigError(f"--ranks {num_ranks}: must be at least 1")
    if named := [name for name in OF_LAUNCHERS if name in environment]:
        what = f"a launcher has started this process ({named[0]}={environment[named[0]]}); leave --ranks out"
        raise ConfigError(f"--ranks {num_ranks}: {what}")


def refuse_more_than_devices(num_ranks: int) -> None:
    """Raise ConfigError if this machine has accelerators, and fewer than ranks; or none, and few cores."""
    import torch

    from deepstow.strategies.engine.memory import accelerator

    if accelerator.kind() is None:
        cores = os.cpu_count() or 1
        if num_ranks > (most := max(LEAST_CORES, cores)):
            what = (
                f"this machine has {cores} cores, and as many processes would stop it; write --ranks {most}, or fewer"
            )
            raise ConfigError(f"--ranks {num_ranks}: {what}")
        return
    count = torch.accelerator.device_count()
    if num_ranks > count:
        cure = f"write --ranks {count}, or training.use_cpu=true"
        raise ConfigError(f"--ranks {num_ranks}: each rank needs a device, and there {_are(count)} here; {cure}")


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def run(num_ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run ``module`` with ``arguments`` on so many ranks. Returns the exit code of the one that failed first, or 0."""
    # A folder of the user's own is not looked through for modules, unless this process was started so.
    safe = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    command = [sys.executable, *safe, "-m", module, *arguments]
    port = describe(Ranks())["MASTER_PORT"]
    ranks: list[subprocess.Popen[bytes]] = []
    with _passing_on(ranks):
        for rank in range(num_ranks):
            environment = describe(Ranks(rank, rank, num_ranks, num_ranks)) | {"MASTER_PORT": port}
            try:
                ranks.append(subprocess.Popen(command, env={**os.environ, **environment}))
            except OSError as error:
                for process in ranks:
                    process.kill()
                raise ConfigError(f"--ranks {num_ranks}: rank {rank} cannot be started: {error.strerror}") from None
        return _wait(ranks)


@contextmanager
def _passing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Inside, signals go to every rank; those that were ignored stay so, here and there."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    handlers: dict[signal.Signals, Any] = {
        sig: signal.signal(sig, pass_on) for sig in PASSED_ON if signal.getsignal(sig) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for sig, handler in handlers.items():
            signal.signal(sig, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended. Once one has failed the others are asked to end, then made to."""
    cause, deadline_s = 0, float("inf")
    while True:
        codes = [process.poll() for process in ranks]
        failed = sorted((code for code in codes if code), key=FOLLOWS.__contains__)
        if failed and not cause:
            cause, deadline_s = failed[0], time.monotonic() + PATIENCE_S
            for process in ranks:
                process.terminate()
        if None not in codes:
            return cause if cause >= 0 else 128 - cause
        if time.monotonic() > deadline_s:
            for process in ranks:
                process.kill()
        time.sleep(LOOK_S)
