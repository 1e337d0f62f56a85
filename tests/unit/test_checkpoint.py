"""Which checkpoint is complete, which is resumed, which may go. Folders only; nothing is trained here."""

import shutil
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.run import checkpoint
from trainer.run.checkpoint import MARK, complete, mark_complete, newest_complete, prune, to_resume, unmark


def make(output_dir: Path, step: int, *, marked: bool = True) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    if marked:
        mark_complete(output_dir, step, is_first=True)
    return folder


def steps(folders: list[Path]) -> list[int]:
    return [int(folder.name.removeprefix("checkpoint-")) for folder in folders]


def refused(output_dir: Path, wish: str | bool) -> str:
    with pytest.raises(ConfigError) as caught:
        to_resume(output_dir, wish)
    return str(caught.value)


def test_complete_is_sorted_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (1000, 5, 200):
        make(tmp_path, step)
    assert steps(complete(tmp_path)) == [5, 200, 1000]
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-1000"


def test_only_marked_checkpoints_count(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20, marked=False)
    make(tmp_path, 30, marked=False)
    (tmp_path / "checkpoint-30" / f".{MARK}-0").write_text("{}")  # killed between writing and renaming the mark
    for name in ("checkpoint-best", "checkpoint-", "checkpoint-40.partial", "my-checkpoint-50"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARK).write_text("{}")
    (tmp_path / "checkpoint-60").write_text("a file, not a folder")
    assert steps(complete(tmp_path)) == [10]


def test_nothing_there_is_nothing_complete(tmp_path: Path) -> None:
    assert complete(tmp_path) == complete(tmp_path / "absent") == []
    assert newest_complete(tmp_path) is None


def test_only_the_first_rank_marks_and_the_mark_appears_whole(tmp_path: Path) -> None:
    folder = make(tmp_path, 10, marked=False)
    mark_complete(tmp_path, 10, is_first=False)
    assert complete(tmp_path) == []
    mark_complete(tmp_path, 10, is_first=True)
    assert sorted(path.name for path in folder.iterdir()) == [MARK, "model.safetensors"]


def test_a_checkpoint_about_to_be_written_again_is_not_complete(tmp_path: Path) -> None:
    make(tmp_path, 10)
    unmark(tmp_path, 10, is_first=False)
    assert steps(complete(tmp_path)) == [10]
    unmark(tmp_path, 10, is_first=True)
    unmark(tmp_path, 20, is_first=True)  # was never there
    assert complete(tmp_path) == []


# Pruning


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [40]), (2, [30, 40]), (3, [20, 30, 40]), (4, [10, 20, 30, 40]), (9, [10, 20, 30, 40])]
)
def test_prune_keeps_the_newest(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    prune(tmp_path, keep, None)
    assert steps(complete(tmp_path)) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in left]


def test_prune_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    monkeypatch.chdir(tmp_path)  # Hugging Face may name the best one by a relative path
    prune(tmp_path, 1, "checkpoint-20")
    assert steps(complete(tmp_path)) == [20, 40]
    prune(tmp_path, 1, str(tmp_path / "checkpoint-40"))
    assert steps(complete(tmp_path)) == [40]


def test_prune_leaves_what_is_not_complete(tmp_path: Path) -> None:
    """An unmarked folder may be one that another process is writing just now."""
    make(tmp_path, 10, marked=False)
    make(tmp_path, 20)
    make(tmp_path, 30)
    prune(tmp_path, 1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-30"]


def test_half_deleted_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20)

    def killed(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1, None)
    assert (tmp_path / "checkpoint-10" / "model.safetensors").exists()
    assert steps(complete(tmp_path)) == [20]


# Resuming


@pytest.mark.parametrize("wish", [None, False])
def test_without_a_wish_a_run_starts_from_the_beginning(tmp_path: Path, wish: bool | None) -> None:
    make(tmp_path, 10)
    assert to_resume(tmp_path, wish) is None


@pytest.mark.parametrize("wish", ["auto", True])
def test_the_newest_complete_one_is_resumed(tmp_path: Path, wish: str | bool) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20)
    make(tmp_path, 30, marked=False)  # killed while saving
    assert to_resume(tmp_path, wish) == tmp_path / "checkpoint-20"


def test_auto_starts_from_the_beginning_where_there_is_none(tmp_path: Path) -> None:
    make(tmp_path, 30, marked=False)
    assert to_resume(tmp_path, "auto") is None
    assert to_resume(tmp_path / "absent", "auto") is None


def test_true_needs_a_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, 30, marked=False)
    assert refused(tmp_path, True) == (
        f"training.resume_from_checkpoint = true: {tmp_path} holds no complete checkpoint; "
        f"write auto to start when there is none"
    )


def test_a_named_checkpoint_is_taken_though_newer_ones_exist(tmp_path: Path) -> None:
    older = make(tmp_path, 10)
    make(tmp_path, 20)
    assert to_resume(tmp_path, str(older)) == older


def test_a_named_checkpoint_must_exist(tmp_path: Path) -> None:
    wish = tmp_path / "checkpoint-11"
    line = f'training.resume_from_checkpoint = "{wish}": there is no such folder'
    assert refused(tmp_path, str(wish)) == line
    make(tmp_path, 10)
    assert refused(tmp_path, str(wish)) == f"{line}; the newest complete one is {tmp_path / 'checkpoint-10'}"
    elsewhere = tmp_path / "other" / "checkpoint-11"  # nothing beside it: the run's own folder is searched
    assert refused(tmp_path, str(elsewhere)).endswith(f"the newest complete one is {tmp_path / 'checkpoint-10'}")


def test_a_named_checkpoint_must_be_complete(tmp_path: Path) -> None:
    wish = make(tmp_path, 20, marked=False)
    line = (
        f'training.resume_from_checkpoint = "{wish}": not complete, it has no {checkpoint.MARK} '
        f"(the run was killed while saving it)"
    )
    assert refused(tmp_path, str(wish)) == line
    make(tmp_path, 10)
    assert refused(tmp_path, str(wish)) == f"{line}; the newest complete one is {tmp_path / 'checkpoint-10'}"


def test_a_fresh_run_sets_the_earlier_one_aside_and_deletes_nothing(tmp_path: Path) -> None:
    assert checkpoint.set_aside(tmp_path) is None
    for expected in ("earlier-1", "earlier-2"):
        (tmp_path / "checkpoint-4").mkdir()
        (tmp_path / "checkpoint-4" / "weights").write_text(expected)
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        (tmp_path / "export").mkdir(exist_ok=True)
        moved = checkpoint.set_aside(tmp_path)
        assert moved == tmp_path / expected
        assert (moved / "checkpoint-4" / "weights").read_text() == expected
        assert (moved / "metrics.jsonl").exists() and not (tmp_path / "metrics.jsonl").exists()
        assert (tmp_path / "export").is_dir()
        assert checkpoint.complete(tmp_path) == []
