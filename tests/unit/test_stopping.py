"""What a signal does to a process in each phase, whatever its main thread is doing; and who is a launcher."""

import ctypes
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.state.processes import started_at
from deepstow.trainer.distributed import stopping
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import (
    LAUNCHER,
    Phase,
    Stop,
    Stopped,
    code_of,
    is_launcher,
    launchers,
    one_is_gone,
)
from deepstow.trainer.errors import ConfigError, ExitCode, write_line
from tests.helpers.tiny import LLAMA, run_config

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


class Child:
    """A process that listens, does ``work(stop)``, and ends with what that returns; 10 if it was stopped."""

    def __init__(self, work: Callable[[Stop], int], **constants: float) -> None:
        self._said, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(theirs, 2)
            sys.stderr = os.fdopen(2, "w")
            for name, value in constants.items():
                setattr(stopping, name, value)
            code = 99
            try:
                with Stop().listening() as stop:
                    os.write(2, b"ready\n")
                    code = work(stop)
            except Stopped as stopped:
                os.write(2, stopped.line.encode())
                code = int(stopped.code)
            finally:
                os._exit(code)
        os.close(theirs)
        assert os.read(self._said, 6) == b"ready\n"

    def send(self, number: signal.Signals, after_s: float = 0.1) -> None:
        time.sleep(after_s)
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with os.fdopen(self._said) as said:
            return code, said.read()


def until_asked(stop: Stop) -> int:
    stop.wait(10.0)
    return 7 if stop.is_asked else 8


def stuck(stop: Stop) -> int:
    """In C, as in a collective: Python's handlers are not called."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    return int(libc.pthread_mutex_lock(mutex))


def trains(then: Callable[[Stop], int]) -> Callable[[Stop], int]:
    def work(stop: Stop) -> int:
        stop.phase = Phase.TRAINING
        return then(stop)

    return work


def test_while_preparing_it_ends_a_main_thread_that_is_stuck_in_c() -> None:
    child = Child(stuck, STUCK_S=0.2)
    child.send(TERM)
    assert child.end() == (10, "SIGTERM: stopped before training began; nothing was saved\n")


def test_while_training_it_is_noted() -> None:
    child = Child(trains(until_asked))
    child.send(USR1)
    assert child.end() == (7, "")


def test_what_a_launcher_repeats_is_one_request_and_a_second_one_ends_at_once() -> None:
    child = Child(trains(stuck), ECHO_S=0.5)
    child.send(TERM)
    child.send(TERM)
    child.send(TERM, after_s=0.8)
    assert child.end() == (143, "SIGTERM a second time: ended at once\n")


def test_ctrl_c_while_preparing_ends_the_run_with_its_own_code() -> None:
    """Once: what a launcher sends with it does not interrupt what is put in order then."""

    def orders(stop: Stop) -> int:
        try:
            return until_asked(stop)
        finally:
            time.sleep(0.5)
            os.write(2, b"in order; ")

    child = Child(orders)
    child.send(INT)
    child.send(TERM)
    assert child.end() == (130, "in order; SIGINT: stopped before training began; nothing was saved")
    child = Child(stuck, STUCK_S=0.2)
    child.send(INT)
    assert child.end() == (130, "SIGINT: stopped before training began; nothing was saved\n")


@pytest.mark.parametrize("others", [(INT, TERM), (TERM, INT), (INT, INT)])
def test_ctrl_c_is_the_reason_whatever_a_launcher_adds(others: tuple[signal.Signals, ...]) -> None:
    def reason(stop: Stop) -> int:
        stop.wait(10.0)
        time.sleep(0.5)
        return int(code_of(stop.reason))

    child = Child(trains(reason))
    for each in others:
        child.send(each)
    said = "SIGINT: the step is finished and saved first; Ctrl-C once more, after 2 s, ends the run at once\n"
    assert child.end() == (130, said * others.count(INT))


@pytest.mark.parametrize("ignored", [INT, signal.SIGHUP], ids=["ctrl-C behind an ampersand", "a terminal under nohup"])
def test_what_was_ignored_before_is_nothing(ignored: signal.Signals) -> None:
    former = signal.signal(ignored, signal.SIG_IGN)
    try:
        child = Child(trains(lambda stop: until_asked(stop) if stop.reason is None else 9))
        child.send(ignored)
        child.send(TERM)
        assert child.end() == (7, ""), "the first would have made the second one end the process"
    finally:
        signal.signal(ignored, former)


def test_forked_processes_end_by_signals_and_do_not_pass_them_on() -> None:
    def forks(stop: Stop) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        for number in (signal.SIGHUP, INT):  # as a terminal sends to all: a loader has to finish the step
            os.kill(pid, number)
        os.kill(pid, TERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        stop.wait(0.8)
        return 5 if status == -TERM and not stop.is_asked else 6

    assert Child(trains(forks)).end() == (5, "")


def test_a_closed_terminal_is_a_request_and_printing_into_it_ends_nothing() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            with Stop().listening() as stop:
                stop.phase = Phase.TRAINING
                while not stop.is_asked:
                    write_line("step")
                write_line("saved")
                write_line("saved", sys.stderr)
                code = 7 if stop.reason == "SIGHUP" else 8
        finally:
            os._exit(code)
    os.read(terminal, 1)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_after_leaving_a_signal_does_what_it_does_without_us() -> None:
    def leaves(stop: Stop) -> int:
        stop.leave()
        time.sleep(20)
        return 0

    child = Child(leaves)
    child.send(TERM)
    assert child.end() == (-TERM, "")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/v/bin/python /v/bin/deepspeed --num_gpus 2 launch/train.py", True),
        ("/v/bin/python -u -m deepspeed.launcher.launch --world_info=e30= launch/train.py", True),
        ("/v/bin/python /v/bin/torchrun --nproc-per-node 2 launch/train.py", True),
        ("python -m torch.distributed.run launch/train.py", True),
        ("/v/bin/python /v/bin/deepstow train --ranks 2", True),
        ("python -m deepstow.launch.cli train --ranks 2", True),
        ("python -m deepstow.launch.train --config x.yaml", False),
        ("/v/bin/python3.11 /v/bin/accelerate launch --cpu launch/train.py", True),
        ("/bin/bash", False),
        ("bash -c deepspeed launch/train.py", False),
        ("python my_own.py deepspeed", False),
        ("tmux", False),
        ("", False),
    ],
)
def test_who_is_a_launcher(command: str, expected: bool) -> None:
    assert is_launcher(command.split()) is expected


def test_the_end_of_any_launcher_above_is_noticed() -> None:
    above = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert launchers() == [] and not one_is_gone([]), "a shell or a test is none"
    chain = [(pid, started_at(pid) or 0.0) for pid in (os.getppid(), above.pid)]
    assert not one_is_gone(chain)
    above.kill()
    above.wait()
    assert one_is_gone(chain)


@pytest.mark.parametrize("phase", ["TRAINING", "PREPARING"])
def test_a_launcher_that_was_killed_is_a_request(phase: str, tmp_path: Path) -> None:
    """The launcher is a program of that name; what it starts listens."""
    listener = f"""
import os, sys, time
from pathlib import Path
from deepstow.trainer.distributed.stopping import Phase, Stop, Stopped
done = Path({str(tmp_path / "done")!r})
with Stop().listening() as stop:
    stop.phase = Phase.{phase}
    assert stop.launchers
    Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
    try:
        stop.wait(20)
        done.write_text(str(stop.reason))
    except Stopped as stopped:
        done.write_text(stopped.line)
"""
    (tmp_path / "listener.py").write_text(listener)
    program = tmp_path / "torchrun"
    program.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'listener.py')!r}])\n")
    launcher = subprocess.Popen(
        [sys.executable, str(program)], cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": "."}
    )
    _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait()
    _until(lambda: (tmp_path / "done").exists() and (tmp_path / "done").read_text())
    said = (tmp_path / "done").read_text()
    assert said.startswith(LAUNCHER) and (phase == "TRAINING" or said.endswith("nothing was saved"))


def _until(true: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("is_over", [False, True], ids=["before the run", "after it"])
def test_the_keyboard_outside_the_run(
    is_over: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the config is read, and while what listens to signals ends: no traceback."""
    from deepstow.launch import train

    class Listening(Stop):
        @contextmanager
        def listening(self) -> Iterator[Stop]:
            yield self
            raise KeyboardInterrupt

    def load(*arguments: object) -> object:
        if is_over:
            raise ConfigError("key: wrong")
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "Stop", Listening)
    monkeypatch.setattr(train, "load", load)
    assert train.main(["--config", "any.yaml"]) == (ExitCode.CONFIG if is_over else ExitCode.INTERRUPTED)
    assert capsys.readouterr().err == ("key: wrong\n" if is_over else "interrupted before training began\n")


def test_a_peer_that_ends_while_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed

    from deepstow.trainer.run import session

    @contextmanager
    def meeting(*args: object, **kwargs: object) -> Iterator[None]:
        raise torch.distributed.DistNetworkError("Failed to recv, got 0 bytes\nC++ CapturedTraceback:")
        yield

    monkeypatch.setattr(session, "process_group", meeting)
    assert session.run(run_config(LLAMA, output_dir=tmp_path), Ranks(1, 1, 2, 2), Stop()) == ExitCode.PEER_DIED
    said = "DistNetworkError: Failed to recv, got 0 bytes"
    assert capsys.readouterr().err == f"rank 1: another rank has ended while the ranks met: {said}\n"
