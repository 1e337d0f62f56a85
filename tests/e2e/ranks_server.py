"""A process that has imported everything once, and forks jobs: real ranks that start in a second instead of six.

Run as a program. It reads from a pipe that has a name, until nobody holds that open: each line is a folder with a
``job``. Each job gets a session (hence a process group) of its own, whose id goes into the file ``pid``, led by a
process that does what a launcher does: it starts the ranks, ends the others when one has failed, and writes the first
failure's code into the file ``code``, with the most memory that a rank has had. A rank runs a script, usually
``launch/train.py``, as ``__main__`` and leaves through the interpreter's own shutdown, where unclosed gloo groups would
show. It stays in there for a while, but only a job that is to run ``to_the_end`` takes all modules apart: that copies
the pages of everything imported, half a second per rank.
Nothing here has run a kernel or opened a group: a process forked after that may hang.
"""

import faulthandler
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[2]
WINDOW_S = 0.1


def main(pipe: Path) -> int:
    sys.path.insert(0, str(REPO))
    sys.path.insert(0, str(REPO / "launch"))  # as the interpreter does for `python launch/train.py`
    os.chdir(REPO)
    importlib.import_module("deepstow.trainer.distributed.preloaded")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries finished jobs
    with pipe.open() as folders:
        for line in folders:
            folder = Path(line.rstrip("\n"))
            pid = os.fork()
            if pid == 0:
                return lead(folder, json.loads((folder / "job").read_text()))
            write(folder / "pid", str(pid))
        pipe.unlink(missing_ok=True)  # the next one who asks starts a server
    return 0


def write(path: Path, text: str) -> None:
    """All of it at once, for those who wait for the file."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def lead(folder: Path, job: dict[str, Any]) -> int:
    """The launcher of one job; returns in its ranks, too, with what the command returned."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGHUP):  # the tests themselves may run under nohup
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where they run in the background
    for number, name in (
        (0, os.devnull),
        (1, folder / "out"),
        (2, folder / "err"),
    ):
        file = os.open(name, os.O_RDONLY if number == 0 else os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.dup2(file, number)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # a rank that does not end writes its stacks
    pids: list[int] = []
    for environment in job["environments"]:
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            faulthandler.register(signal.SIGQUIT, all_threads=False)
            run(job["script"], job["arguments"], job["to_the_end"])
        pids.append(pid)
    code = wait(pids)
    write(folder / "code", f"{code} {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10}")  # MiB
    os._exit(0)


class LastModule:
    """Among the modules: goes when the interpreter is shutting down, before they are taken apart."""

    def __init__(self, code: int) -> None:
        self.code, self.sleep, self.leave = code, time.sleep, os._exit

    def __del__(self) -> None:
        self.sleep(WINDOW_S)  # a thread that asks for the interpreter's lock now dies, and the process with it
        self.leave(self.code)


def run(script: str, arguments: list[str], to_the_end: bool) -> NoReturn:
    sys.argv = [str(REPO / script), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if not to_the_end:
            sys.modules["last"] = LastModule(int(end.code or 0))  # type: ignore[assignment]
        raise
    sys.exit(0)  # the command has ended by SystemExit; this one is for the type checker


def wait(pids: list[int]) -> int:
    """Until all have ended; the first failure ends the others, as torchrun and DeepSpeed do."""
    first, left = 0, set(pids)
    while left:
        pid, status = os.waitpid(-1, 0)
        left.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            time.sleep(0.5)
            for other in left:
                os.kill(other, signal.SIGTERM)
    return first


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
