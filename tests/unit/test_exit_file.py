"""What ``exit.json`` says when several ranks end, each with its own code, in any order."""

import json
import os
import socket
from pathlib import Path

import pytest

from strategies.core.processes import started_at
from trainer.dist.exit_file import ExitFile
from trainer.errors import ConfigError, ExitCode

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
    [((1, 15), 1), ((15, 1), 1), ((13, 13), 13), ((15, 13), 15), ((0, 11), 11), ((12, 0), 12), ((10, 10), 10)],
)
def test_the_cause_stays(codes: tuple[int, int], code: int, tmp_path: Path) -> None:
    for number, each in enumerate(codes):
        rank(tmp_path, number).write(each)
    assert said(tmp_path) == code
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_every_code_has_a_meaning(tmp_path: Path) -> None:
    for code in ExitCode:
        rank(tmp_path, 0).clear()
        rank(tmp_path, 0).write(code)
        found = json.loads((tmp_path / "exit.json").read_text())
        assert found["code"] == code and "signal" not in found["meaning"]


def test_a_run_that_is_refused(tmp_path: Path) -> None:
    """One rank says it, if the folder is there and nobody else's."""
    rank(tmp_path / "none", 0, owns=False).write(2)
    rank(tmp_path, 1, owns=False).write(2)
    (tmp_path / "run.lock").touch()
    rank(tmp_path, 0, owns=False).write(2)
    assert said(tmp_path) is None
    (tmp_path / "run.lock").unlink()
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
