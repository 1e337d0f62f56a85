"""``commit.py`` at each of its steps: an error or a kill there leaves the earlier content or the new one, complete."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deepstow.strategies.state import commit
from tests.e2e.commands import REPO

TRACED = {commit.__file__, shutil.__file__}
LINES = 200  # more than any of these operations has


def write_file(place: Path, content: str) -> None:
    commit.replace_file(place, content)


def write_folder(place: Path, content: str) -> None:
    with commit.replaced_folder(place) as draft:
        (draft / "inner").mkdir()
        for name in ("a", "inner/b"):
            (draft / name).write_text(content)


def add_folder(place: Path, content: str) -> None:
    with commit.added_folder(place) as draft:
        (draft / "inner").mkdir()
        for name in ("a", "inner/b"):
            (draft / name).write_text(content)


def found(place: Path) -> str | None:
    """What a reader finds, who looks for the earlier folder as well; it must be whole."""
    if not place.exists():
        place = commit.earlier(place)
    if place.is_file():
        return place.read_text()
    if not place.exists():
        return None
    files = {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob("*") if path.is_file()}
    assert files.keys() == {"a", "inner/b"} and len(set(files.values())) == 1, files
    return files["a"]


def at_line(number: int, action: Callable[[], None], work: Callable[[], None]) -> bool:
    """Run ``work`` and ``action`` before the ``number``-th line of the traced files; whether there is such a line."""
    left = number

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left <= 0


def no_space() -> None:
    raise OSError(28, "No space left on device")


def fails(work: Callable[[], None], number: int) -> bool:
    """Whether ``work`` met a full disk before its ``number``-th line."""
    try:
        return at_line(number, no_space, work)
    except OSError:
        return True


def killed(work: Callable[[], None], number: int) -> bool:
    """Whether a process that was to do ``work`` has been ended before its ``number``-th line, without any cleanup."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            at_line(number, lambda: os._exit(9), work)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


WRITERS = [write_file, write_folder, add_folder]


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk, which is not turned off here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def at_any_step(ends: Any, write: Any, had: bool, folder: Path) -> None:
    """A kill may leave a hidden draft, an error nothing; the next write works after both."""
    seen = set()
    for number in range(1, LINES):
        place = folder / str(number) / "place"
        place.parent.mkdir(parents=True)
        if had:
            write(place, "old")
        there = ends(lambda place=place: write(place, "new"), number)
        seen.add(found(place))
        if not there:
            break
        if write is not add_folder:
            write(place, "newest")
            assert found(place) == "newest"
            assert [*place.parent.glob("*" if ends is fails else "[!.]*")] == [place]
    assert not there and number > 10
    assert seen == {"old" if had else None, "new"} if write is not add_folder or not had else seen == {"old"}


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("had", [True, False], ids=["replaces", "first"])
@pytest.mark.parametrize("write", WRITERS)
def test_an_error_at_any_step(write: Any, had: bool, tmp_path: Path) -> None:
    at_any_step(fails, write, had, tmp_path)


def all_killed(folder: Path) -> None:
    os.fsync = lambda fd: None
    for number, (write, had) in enumerate(product(WRITERS, (True, False))):
        at_any_step(killed, write, had, folder / str(number))


def test_a_kill_at_any_step(tmp_path: Path) -> None:
    """Hundreds of forks of a process that is small: of this one, with all it has imported, each takes long."""
    program = (
        "import pathlib, sys; from tests.faults import test_commit as it; it.all_killed(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=REPO, check=True)


@pytest.mark.parametrize("write", WRITERS)
def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps what was synced: contents first, then the name."""
    steps: list[tuple[str, Path]] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(("sync", Path(f"/proc/self/fd/{fd}").readlink())), sync(fd))
    )
    for name in ("rename", "replace"):
        move = getattr(Path, name)

        def moved(self: Path, target: Path, move: Any = move) -> Path:
            steps.append(("move", self))
            return move(self, target)

        monkeypatch.setattr(Path, name, moved)
    write(tmp_path / "place", "new")
    (at,) = (index for index, (what, _) in enumerate(steps) if what == "move")
    draft = steps[at][1]
    parts = {draft} if write is write_file else {draft / "a", draft / "inner/b", draft / "inner", draft}
    assert {path for _, path in steps[:at]} == parts
    assert steps[at + 1 :] == [("sync", tmp_path)]


@pytest.mark.parametrize("put", [write_folder, lambda place, content: commit.put_in_place(place.parent / "d", place)])
def test_a_file_in_the_place_of_a_folder_is_not_replaced(put: Any, tmp_path: Path) -> None:
    (tmp_path / "place").write_text("somebody's")
    with pytest.raises(FileExistsError, match="not a folder, so it is not replaced"):
        put(tmp_path / "place", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_folder_that_is_a_link_is_exchanged_where_it_leads(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere/place", "old")
    (tmp_path / "link").symlink_to("elsewhere/place")
    write_folder(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and found(tmp_path / "elsewhere/place") == "new"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["place"]


def test_the_first_of_two_wins(tmp_path: Path) -> None:
    with commit.added_folder(tmp_path / "place") as first, commit.added_folder(tmp_path / "place") as second:
        (first / "text").write_text("first")
        (second / "text").write_text("second")
    assert (tmp_path / "place/text").read_text() == "second", "the inner block ends first"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_killed_preparation_leaves_nothing_for_good(tmp_path: Path) -> None:
    """Its draft goes when something else is made beside it; the draft of who lives stays."""
    (tmp_path / "cache").mkdir()
    pid = os.fork()
    if pid == 0:
        with commit.added_folder(tmp_path / "cache/rows") as draft:
            (draft / "text").write_text("half")
            os._exit(9)
    os.waitpid(pid, 0)
    drafts = [*(tmp_path / "cache").glob(".*")]
    assert drafts[0].is_dir()
    with commit.added_folder(tmp_path / "cache/one") as living:
        (living / "text").write_text("one")
        with commit.added_folder(tmp_path / "cache/two"):
            assert not drafts[0].exists()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["one", "two"]
    assert (tmp_path / "cache/one/text").read_text() == "one"


def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    commit.refuse_unwritable(tmp_path / "file")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(OSError, match="No such file"):
        commit.refuse_unwritable(tmp_path / "nowhere/file")
