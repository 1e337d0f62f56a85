"""Which checkpoint is good, which is resumed, which may go. Folders only; nothing is trained here."""

import os
import shutil
from pathlib import Path

import pytest

from deepstow.strategies.state import commit
from deepstow.strategies.state.sealed import MANIFEST, Damaged, read, seal
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.checkpoints import checkpoint
from deepstow.trainer.run.checkpoints.checkpoint import (
    DELETED,
    FORMER_MARK,
    WRITING,
    clear,
    complete,
    delete_old,
    verified,
)
from tests.helpers.checkpoints import make
from tests.helpers.tiny import LLAMA, run_config


def steps(output_dir: Path) -> list[int]:
    return [found.step for found in complete(output_dir)]


def damage(folder: Path, name: str = "model.safetensors") -> None:
    (folder / name).write_bytes(b"weightx" + (folder / name).read_bytes()[7:])


def resumed(output_dir: Path, wish: object) -> tuple[Path | None, list[str]]:
    options = {} if wish is None else {"resume_from_checkpoint": wish}
    found, said = checkpoint.to_resume(run_config(LLAMA, output_dir=output_dir, **options))
    return found and found.path, said


def refused(output_dir: Path, wish: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resumed(output_dir, wish)
    (line,) = caught.value.lines
    assert line.startswith("training.resume_from_checkpoint = ")
    return line.partition(": ")[2]


def test_only_folders_with_their_manifest_count(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20, marked=False)
    make(tmp_path, 30)
    (tmp_path / "checkpoint-30" / MANIFEST).write_text("{")
    make(tmp_path / WRITING, 40)
    make(tmp_path, 50).rename(tmp_path / "checkpoint-51")  # another step's under this name
    for name in ("checkpoint-best", "checkpoint-", "my-checkpoint-50"):
        shutil.copytree(tmp_path / "checkpoint-10", tmp_path / name)
    (tmp_path / "checkpoint-60").write_text("a file, not a folder")
    assert steps(tmp_path) == [10]
    make(tmp_path, 5)
    assert steps(tmp_path) == [5, 10], "not by name"
    with pytest.raises(FileNotFoundError):
        steps(tmp_path / "absent")


def test_every_byte_is_compared(tmp_path: Path) -> None:
    folder = make(tmp_path, 10)
    assert verified(folder).step == 10
    damage(folder)
    with pytest.raises(Damaged, match=r"^model\.safetensors: damaged, its hash is another$"):
        verified(folder)
    (folder / "empty").unlink()
    with pytest.raises(Damaged, match=r"^empty: missing \(and 1 more\)$"):
        verified(folder)


def test_what_else_is_damage(tmp_path: Path) -> None:
    """A manifest of another release, Hugging Face's state of another step, and a pipe, which is not waited for."""
    folder = make(tmp_path, 10)
    about = read(folder, "checkpoint").about
    seal(folder, "checkpoint", {"step": 10, "finite": True})
    with pytest.raises(Damaged, match=r"^manifest\.json is of another release: run: field required$"):
        verified(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    seal(folder, "checkpoint", about)
    with pytest.raises(Damaged, match=r"^trainer_state\.json is of step 4, its manifest of step 10$"):
        verified(folder)
    for name in ("model.safetensors", MANIFEST):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(Damaged, match=rf"^{name}:? cannot be read"):
            verified(folder)


# Pruning


def test_prune_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    monkeypatch.chdir(tmp_path)  # Hugging Face may name the best one by a relative path
    delete_old(tmp_path, 1, 40, Path("checkpoint-20"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-40"]


@pytest.mark.parametrize("finite", [(True, False, False, True), (False, True, True, False)])
@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_finite_one_is_never_deleted(tmp_path: Path, finite: tuple[bool, ...], keep: int) -> None:
    """Over a whole run that saves four times."""
    good: list[int] = []
    for step, is_finite in enumerate(finite, start=1):
        make(tmp_path, step, finite=is_finite)
        good += [step] * is_finite
        delete_old(tmp_path, keep, step, None)
        left = steps(tmp_path)
        newest = range(max(1, step - keep + 1), step + 1)
        assert set(left) == {*newest, *good[-1:]}


def test_checkpoints_of_later_steps_do_not_push_out_the_one_just_written(tmp_path: Path) -> None:
    """A run that went back behind them: they are another history, and may be damaged."""
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    make(tmp_path, 5, marked=False)  # what is not complete is left alone
    delete_old(tmp_path, 1, 20, None)
    assert steps(tmp_path) == [20, 30, 40] and (tmp_path / "checkpoint-5").is_dir()


def test_half_deleted_has_no_name_and_goes_with_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20)
    remove = shutil.rmtree

    def killed(folder: Path) -> None:
        (folder / "checkpoint-10/model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(commit.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_old(tmp_path, 1, 20, None)
    monkeypatch.setattr(commit.shutil, "rmtree", remove)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", DELETED]
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-20"]


def test_of_a_link_nothing_is_deleted(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "archive", 10)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint-10").symlink_to("../archive/checkpoint-10")
    make(tmp_path / "run", 20)
    (line,) = delete_old(tmp_path / "run", 1, 20, None)
    assert "checkpoint-10: a symbolic link, so it is kept though training.save_total_limit = 1" in line
    assert verified(elsewhere).step == 10
    assert resumed(tmp_path / "run", str(tmp_path / "run/checkpoint-10"))[0] == tmp_path / "run/checkpoint-10"


# Resuming


def test_auto_starts_from_the_beginning_only_where_there_is_none(tmp_path: Path) -> None:
    assert resumed(tmp_path, "auto") == (None, [])
    with pytest.raises(FileNotFoundError):  # of a disk that has gone: a run has made its folder by then
        resumed(tmp_path / "absent", "auto")
    make(tmp_path / WRITING, 10)
    assert resumed(tmp_path, "auto") == (None, [])
    assert refused(tmp_path, True) == f"{tmp_path} holds no checkpoint; write auto to start when there is none"
    for step in (10, 20):
        damage(make(tmp_path, step))
    assert refused(tmp_path, "auto") == (
        f"{tmp_path}/checkpoint-20: damaged: model.safetensors: damaged, its hash is another, and no older one is "
        f"good; write false to start from the beginning; they are kept"
    )


def test_a_named_checkpoint_is_taken_though_newer_ones_exist(tmp_path: Path) -> None:
    older = make(tmp_path, 10)
    make(tmp_path, 20)
    assert resumed(tmp_path, None) == resumed(tmp_path, False) == (None, [])
    assert resumed(tmp_path, str(older)) == (older, [])
    shutil.copytree(older, tmp_path / "kept")
    assert resumed(tmp_path, str(tmp_path / "kept"))[0] == tmp_path / "kept", "under any name of the user's"


def test_checkpoints_of_earlier_releases_say_how_to_go_on(tmp_path: Path) -> None:
    folder = make(tmp_path, 10, marked=False)
    (folder / FORMER_MARK).write_text('{"step": 10}')
    line = (
        f"written by an earlier release, which kept no hashes: go on with that release, or start from its weights with "
        f"model.name_or_path: {folder} and training.resume_from_checkpoint: false"
    )
    assert refused(tmp_path, str(folder)) == line
    assert refused(tmp_path, "auto") == f"{folder}: {line}"
