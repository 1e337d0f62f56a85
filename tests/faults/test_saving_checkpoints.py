"""A process that ends at any file operation of a save, with or without what it has not synced: a good one is left.

The files are small and the protocol is the real one (``trainer/run/checkpoints/saving.py``). Nothing is trained here.
"""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed

from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.run.checkpoints import checkpoint, saving
from deepstow.trainer.run.checkpoints.checkpoint import Manifest, complete, to_resume, verified
from tests.helpers.checkpoints import about, make
from tests.helpers.tiny import LLAMA, run_config

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
MOST = 400  # more than a save has


def save(output_dir: Path, step: int, *, keep: int = 1, finite: bool = True) -> None:
    """As ``Trainer.save_checkpoint``: the draft, the commit, then the pruning."""
    output_dir.mkdir(exist_ok=True)
    with saving.draft(output_dir, 0, writes=True) as folder:
        written = make(folder, step, marked=False)
        saving.commit(written, output_dir / written.name, lambda: Manifest(step=step, finite=finite, run=about()))
        checkpoint.delete_old(output_dir, keep, step, None)


def ends_at(number: int, output_dir: Path, work: Callable[[], None]) -> list[str] | None:
    """End a process that does ``work`` before its ``number``-th file operation in ``output_dir``; the files that it has
    made there and not synced. None if it has no such operation."""
    told = output_dir.with_name("unsynced")
    pid = os.fork()
    if pid:
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        return told.read_text().splitlines() if ended else None
    left, before, synced = number, {path.stat().st_ino for path in output_dir.rglob("*")}, set[int]()

    def end() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            files = [path for path in output_dir.rglob("*") if path.is_file()]
            lost = [path for path in files if path.stat().st_ino not in before | synced]
            told.write_text("\n".join(str(path.relative_to(output_dir)) for path in lost))
            os._exit(9)

    def audited(event: str, arguments: tuple[object, ...]) -> None:
        if left > 0 and event in OPERATIONS and str(arguments[0]).startswith(str(output_dir)):
            end()

    def noted(handle: int) -> None:
        end()
        synced.add(os.fstat(handle).st_ino)

    os.fsync = noted
    sys.addaudithook(audited)
    with suppress(BaseException):
        work()
        os._exit(0)
    os._exit(1)


def resumed_at(run: Path) -> int:
    """The step from which a run goes on; after that it saves again, and nothing else is left."""
    checkpoint.clear(run)
    found, _ = to_resume(run_config(LLAMA, output_dir=run, resume_from_checkpoint="auto"))
    assert found is not None
    save(run, 30)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-30"]
    return found.step


@pytest.mark.parametrize(
    "again", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a new step", "a step that is there"]
)
def test_an_end_at_any_operation_leaves_a_good_checkpoint(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed; and in a copy of its folder the power was cut, so that what was not synced is empty."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the disk is not turned off here
    new = 10 if again else 20
    killed, cut = set[int](), set[int]()
    for step in (5, 10):
        save(tmp_path / "before", step, keep=9)
    for number in range(1, MOST):
        run, copy = tmp_path / f"{number}-killed", tmp_path / f"{number}-cut"
        shutil.copytree(tmp_path / "before", run)
        lost = ends_at(number, run, lambda run=run: save(run, new))
        if lost is None:
            break
        shutil.copytree(run, copy)
        for name in lost:
            os.truncate(copy / name, 0)
        assert all(verified(each.path) for each in complete(run)), "what has the name is whole"
        killed.add(resumed_at(run))
        cut.add(resumed_at(copy))
    assert lost is None and resumed_at(run) == new and number > 30
    assert killed == cut == {10, new}


def test_a_disk_that_is_full_at_any_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails in one OSError, leaves the earlier checkpoints and no draft, and the next one works."""
    sync = os.fsync
    for number in range(1, MOST):
        run = tmp_path / str(number)
        save(run, 10)
        left = number

        def full(handle: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(28, "No space left on device")
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with suppress(OSError):
                save(run, 20)
        assert {path.name for path in run.iterdir()} <= {"checkpoint-10", "checkpoint-20"}
        assert all(verified(each.path) for each in complete(run)) and complete(run)
        save(run, 30)
        if left > 0:
            break
    assert left > 0 and number > 5
    with pytest.raises(OSError, match=r"a checkpoint takes about .* free"), saving.draft(run, 1 << 60, writes=True):
        pass
    assert [path.name for path in run.iterdir()] == ["checkpoint-30"]


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (float("nan"), False), (float("-inf"), False)])
def test_values_that_are_not_finite_are_found_in_the_files(value: float, finite: bool, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"weight": torch.tensor([1.0, value, 2.0]), "mask": torch.tensor([float("-inf")]), "none": torch.ones(0)}
    save_file(tensors | {"number": torch.tensor([3])}, tmp_path / "model.safetensors")
    assert saving.all_finite(tmp_path, {"mask"}) is finite


def disk_full_on(ranks: Ranks, output_dir: Path, failing: int) -> list[list[str]]:
    """What each rank meets when one of them cannot write, and then when all can: the draft goes, or stays."""

    def write(folder: Path, failing: int) -> None:
        if ranks.is_first:
            make(folder, 10, marked=False)
        if ranks.rank == failing:
            raise OSError(28, "No space left on device")

    said = []
    for rank in (failing, -1):
        try:
            with saving.draft(output_dir, 0, writes=ranks.is_first) as folder:
                saving.together(lambda folder=folder, rank=rank: write(folder, rank))
                saving.together(lambda: None)
            said.append(f"wrote into {[path.name for path in output_dir.iterdir()]}")
        except OSError as error:
            said.append(str(error))
    found: list[list[str]] = [[] for _ in range(ranks.world_size)]
    torch.distributed.all_gather_object(found, said)
    return found


@pytest.mark.ranks
def test_if_one_rank_cannot_write_all_learn_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = run_world(2, disk_full_on, tmp_path, 1)
    full = "[Errno 28] No space left on device"
    assert [said[0] for said in found] == [full, full]
    assert all(said[1].startswith("wrote into") and "checkpoints.writing" in said[1] for said in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoints.writing"], "to be sealed"
    assert verified(tmp_path / "checkpoint-5")
