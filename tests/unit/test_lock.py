"""One run in a folder: who gets the lock, who is refused and how, and what a killed run leaves."""

import ctypes
import errno
import fcntl
import json
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepstow.strategies.state import processes
from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.errors import ConfigError, ExitCode
from deepstow.trainer.planning.from_config import WRITTEN
from deepstow.trainer.run import lock
from deepstow.trainer.run.lock import NAME
from tests.helpers.tiny import LLAMA, run_config

held = partial(lock.held, lost=print)


def in_child(work: Callable[[], None]) -> int:
    """The pid of a process that does ``work`` and ends with 0, or with 2 if it was refused."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            work()
            code = 0
        except ConfigError:
            code = 2
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(config: Any) -> str:
    with pytest.raises(ConfigError) as caught, held(config):
        pass
    assert len(caught.value.lines) == 1
    return str(caught.value)


def test_of_many_starters_one_wins_every_time(tmp_path: Path) -> None:
    """All start at once, the winner stays until all others have ended; a lock that a winner leaves is taken again."""
    config = run_config(LLAMA, output_dir=tmp_path / "run")
    for _ in range(2):
        go, stay = os.pipe(), os.pipe()

        def starter(go: tuple[int, int] = go, stay: tuple[int, int] = stay) -> None:
            os.close(go[1])
            os.close(stay[1])
            os.read(go[0], 1)
            with held(config):
                os.read(stay[0], 1)

        pids = [in_child(starter) for _ in range(4)]
        os.close(go[1])  # all of them read the end of the pipe
        left = set(pids)
        while len(left) > 1:
            pid, status = os.waitpid(-1, 0)
            left.discard(pid)
            assert os.waitstatus_to_exitcode(status) == 2
        os.close(stay[1])
        assert code_of(left.pop()) == 0
        os.close(go[0])
        os.close(stay[0])


def test_a_folder_that_a_refused_run_has_made_goes_again(tmp_path: Path) -> None:
    with held(run_config(LLAMA, output_dir=tmp_path / "a" / "run")):
        ended = ExitFile()
        ended.folder = tmp_path / "a" / "run"
        ended.clear()
        assert (tmp_path / "a" / "run" / NAME).exists()
    assert [*tmp_path.iterdir()] == []


def test_the_line_names_the_holder_and_a_killed_holder_is_forgotten(tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path)
    ready_read, ready_write = os.pipe()

    def holds() -> None:
        with held(config):
            os.write(ready_write, b"1")
            signal.pause()

    pid = in_child(holds)
    os.close(ready_write)
    assert os.read(ready_read, 1) == b"1"
    try:
        line = refused(config)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert line.startswith("training.output_dir = ") and f": in use by another run: process {pid} on " in line
    assert line.endswith("; wait for it, or name another folder")
    assert code_of(pid) == -signal.SIGKILL
    assert (tmp_path / NAME).exists()
    with held(config):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert [*tmp_path.iterdir()] == []


def test_a_killed_holder_whose_threads_have_not_ended_is_waited_for(tmp_path: Path) -> None:
    """Its first thread has, which is what is seen of it; the kernel keeps its locks until the last one has, too."""
    config, go = run_config(LLAMA, output_dir=tmp_path), os.pipe()

    def dies_slowly() -> None:
        os.close(go[1])
        with held(config):
            threading.Thread(target=lambda: os._exit(len(os.read(go[0], 1)))).start()
            ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread

    pid = in_child(dies_slowly)
    os.close(go[0])
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    threading.Timer(0.2, os.close, [go[1]]).start()
    with held(config):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert code_of(pid) == 0


def holder(config: Any, *, forks: bool = False) -> tuple[int, int]:
    """Pids of a process that holds the lock, and of one that it has forked, as a loader is (else 0)."""
    ready_read, ready_write = os.pipe()

    def holds() -> None:
        with held(config):
            loader = in_child(signal.pause) if forks else 0
            os.write(ready_write, str(loader).encode())
            signal.pause()

    pid = in_child(holds)
    os.close(ready_write)
    loader = int(os.read(ready_read, 20))
    os.close(ready_read)
    return pid, loader


def test_the_folder_is_held_though_the_file_was_removed(tmp_path: Path) -> None:
    """Under any name; the one that is refused leaves no file that names it. What was forked holds nothing."""
    config, moved = (run_config(LLAMA, output_dir=tmp_path / name) for name in ("run", "moved"))
    pid, loader = holder(config, forks=True)
    try:
        (tmp_path / "run" / NAME).unlink()
        what = "in use by another run, whose run.lock was removed; wait for it, or name another folder"
        assert refused(config).endswith(f": {what}") and not (tmp_path / "run" / NAME).exists()
        (tmp_path / "run").rename(tmp_path / "moved")
        assert refused(moved).endswith(f": {what}")
        os.kill(pid, signal.SIGKILL)
        assert code_of(pid) == -signal.SIGKILL
        with held(moved):
            os.kill(loader, 0)  # it lives
            assert code_of(in_child(lambda: refused(moved))) == 0
    finally:
        for each in (pid, loader):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def test_a_loader_that_outlives_its_run_does_not_hold_the_folder(tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path)
    with held(config):
        loader = in_child(signal.pause)
    try:
        with held(config):
            pass
    finally:
        os.kill(loader, signal.SIGKILL)
        code_of(loader)


def test_without_locks_of_folders_the_file_is_what_protects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where they are locks of a range, which need a descriptor that can write."""

    def none(handle: int, how: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", none)
    config = run_config(LLAMA, output_dir=tmp_path)
    pid, _ = holder(config)
    try:
        assert f"in use by another run: process {pid} on " in refused(config)
    finally:
        os.kill(pid, signal.SIGKILL)
        code_of(pid)
    with held(config):
        pass


def test_a_folder_that_goes_ends_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write into another one. A file that goes does not."""
    monkeypatch.setattr(lock, "TOUCHED_S", 0.02)
    lines = list[str]()
    with lock.held(run_config(LLAMA, output_dir=tmp_path / "run"), lines.append):
        (tmp_path / "run" / NAME).unlink()
        time.sleep(0.2)
        assert lines == []
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        deadline_s = time.monotonic() + 20.0
        while not lines:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    said = "was moved or replaced while this run is in it, which ends; move it back, and start again"
    assert lines == [f"{tmp_path / 'run'}: {said}"]


def test_a_lock_of_another_host_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder touches it; one that nobody touches is of a host, or a container, that is gone."""
    monkeypatch.setattr(lock, "WATCHED_S", 0.4)
    monkeypatch.setattr(lock, "TOUCHED_S", 0.05)
    config = run_config(LLAMA, output_dir=tmp_path)
    with held(config):
        there, here = (tmp_path / NAME).read_text(), socket.gethostname()
        monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
        assert f"in use by another run: process {os.getpid()} on {here}" in refused(config)
        assert (tmp_path / NAME).read_text() == there
    (tmp_path / NAME).write_text(there)
    with held(config):
        assert json.loads((tmp_path / NAME).read_text())["host"] == "node-7"


@pytest.mark.parametrize(
    ("pid", "late_s", "starts", "refuses"),
    [
        (os.getppid(), 0.5, None, True),
        (os.getppid(), 0.0, -1.0, True),  # of another user: not to be seen when it began
        (os.getppid(), 400.0, None, False),  # the number is another process's now
        (1 << 22, 0.0, None, False),  # no such process
        (os.getpid(), 0.0, None, False),  # it is ours now, as pid 1 of a container is
    ],
    ids=["lives", "of another user", "used again", "gone", "ours"],
)
def test_a_file_system_without_locks_is_held_by_the_process_number(
    pid: int, late_s: float, starts: float | None, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(LLAMA, output_dir=tmp_path)
    monkeypatch.setattr(lock, "_lock", lambda handle: False)
    content = {"pid": pid, "host": socket.gethostname(), "start": (processes.started_at(pid) or 0.0) + late_s}
    (tmp_path / NAME).write_text(json.dumps(content))
    if starts is not None:
        monkeypatch.setattr(processes, "started_at", lambda pid: starts)
    if refuses:
        assert f"process {pid} on" in refused(config)
    else:
        with held(config):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_what_a_link_leads_to_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("own")
    (tmp_path / NAME).symlink_to(tmp_path / "own")
    assert "cannot be written (run.lock is a symbolic link)" in refused(run_config(LLAMA, output_dir=tmp_path))
    assert (tmp_path / "own").read_text() == "own" and (tmp_path / NAME).is_symlink()
    (tmp_path / NAME).unlink()
    os.mkfifo(tmp_path / NAME)
    assert "cannot be written (run.lock is no file)" in refused(run_config(LLAMA, output_dir=tmp_path))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\0b", "no folder can have this name (embedded null byte)"),
        ("a" * 300, "no folder can have this name (File name too long)"),
        *[("run", f"{{tmp}}/run/{file} is no file, and a run writes one there") for file in WRITTEN[:1]],
    ],
    ids=["NUL", "300 characters", "a pipe"],
)
def test_a_folder_that_a_run_cannot_use_is_one_line(name: str, why: str, tmp_path: Path, capsys: Any) -> None:
    """Of the whole command: no traceback, no waiting for a pipe, and nothing has been made."""
    from deepstow.launch.train import main

    (tmp_path / "run").mkdir()
    for file in WRITTEN:
        if file in why:
            os.mkfifo(tmp_path / "run" / file)
    config = run_config(LLAMA, output_dir=tmp_path / name)
    (tmp_path / "c.yaml").write_text(config.dump())
    assert main(["--config", str(tmp_path / "c.yaml")]) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "training.output_dir = " in err and f": {why.format(tmp=tmp_path)}; name another folder\n" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "run"]
