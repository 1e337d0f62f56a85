"""What ``exit.json`` says when several ranks end, each with its own code, in any order."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.state.processes import started_at
from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.errors import ConfigError, ExitCode

HELD = '{"pid": 1}'  # in the run's lock


def said(folder: Path) -> int | None:
    path = folder / "exit.json"
    return int(json.loads(path.read_text())["code"]) if path.exists() else None


def rank(folder: Path, number: int, owns: bool = True) -> ExitFile:
    made = ExitFile(number, 2)
    made.folder, made.lock = folder, HELD if owns else None
    return made


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((1, 15), 1), ((15, 1), 1), ((13, 13), 13), ((15, 13), 15), ((0, 11), 11), ((12, 0), 12), ((10, 10), 10),
        ((15, 130), 130), ((13, 10), 10), ((15, 0), 0), ((130, 15), 130), ((14, 130), 14), ((10, 130), 10),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_links", [True, False])
def test_the_cause_stays(
    codes: tuple[int, int], code: int, has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *args, **kwargs: os.open(tmp_path / "none", 0))
    rank(tmp_path, 0).clear()
    for number, each in enumerate(codes):
        rank(tmp_path, number).write(each)
    assert said(tmp_path) == code
    follow = max(codes) <= 15 and min(codes) >= 13 and 14 not in codes
    assert {path.name for path in tmp_path.iterdir()} == {"exit.json"} | ({".exit.json"} if follow else set())


@pytest.mark.parametrize("code", [10, 15])
def test_an_end_before_the_lock_is_not_what_an_earlier_run_said(code: int, tmp_path: Path) -> None:
    rank(tmp_path, 0).write(ExitCode.FINISHED)
    rank(tmp_path, 0, owns=False).write(code)
    assert said(tmp_path) == code


def full(path: Any, flags: int, mode: int = 0o777, opened: Any = os.open) -> int:
    """``os.open`` where nothing new can be made."""
    if flags & os.O_CREAT and not Path(path).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return int(opened(path, flags, mode))


@pytest.mark.parametrize("codes", [(15, 14), (14, 15)])
def test_a_disk_that_is_full_at_the_end(
    codes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the cause, which the first rank has kept, and for nothing that follows from it."""
    rank(tmp_path, 0).clear()
    monkeypatch.setattr(os, "open", full)
    for number, each in enumerate(codes):
        rank(tmp_path, 1 - number).write(each)
    assert said(tmp_path) == 14
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_what_is_another_runs_by_now(tmp_path: Path) -> None:
    """A rank that ends late writes nothing into the folder of the next run; a lock that was removed is nobody's."""
    late = rank(tmp_path, 1)
    (tmp_path / "run.lock").write_text("{}")
    late.write(15)
    assert said(tmp_path) is None
    (tmp_path / "run.lock").write_text(HELD)
    late.write(15)
    assert said(tmp_path) == 15
    (tmp_path / "run.lock").unlink()
    late.write(1)
    assert said(tmp_path) == 1


def test_a_run_that_is_refused(tmp_path: Path) -> None:
    """One rank says it, if the folder is there and nobody else's."""
    rank(tmp_path / "none", 0, owns=False).write(2)
    rank(tmp_path, 1, owns=False).write(2)
    (tmp_path / "run.lock").touch()
    rank(tmp_path, 0, owns=False).write(2)
    assert said(tmp_path) is None
    (tmp_path / "run.lock").unlink()
    folder = os.open(tmp_path, os.O_RDONLY)  # of a run whose lock somebody has removed
    fcntl.flock(folder, fcntl.LOCK_EX)
    rank(tmp_path, 0, owns=False).write(2)
    assert said(tmp_path) is None
    os.close(folder)
    rank(tmp_path, 0, owns=False).write(2)
    assert said(tmp_path) == 2


def test_a_lock_that_a_killed_run_has_left_is_nobodys(tmp_path: Path) -> None:
    host, pid = socket.gethostname(), os.getpid()
    start = started_at(pid) or 0.0
    for holder, code in (((host, start), None), (("another", 1.0), None), ((host, start - 1e6), 2)):
        holds = {"pid": pid, "host": holder[0], "start": holder[1]}
        (tmp_path / "run.lock").write_text(json.dumps(holds))
        rank(tmp_path, 0, owns=False).write(2)
        assert said(tmp_path) == code


def test_what_is_in_its_place(tmp_path: Path) -> None:
    """A folder cannot be removed, which is one line; what cannot be looked at changes nothing."""
    (tmp_path / "exit.json").mkdir()
    with pytest.raises(ConfigError, match=r"exit.json: cannot be removed \(Is a directory\)"):
        rank(tmp_path, 0).clear()
    (tmp_path / "run.lock").symlink_to("run.lock")
    rank(tmp_path, 0, owns=False).write(2)
    rank(tmp_path, 0).write(1)
    assert {path.name for path in tmp_path.iterdir()} == {"exit.json", "run.lock"}
