"""What is set aside, what stays, and what a kill in the middle of it leaves. Folders only; nothing is trained here."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.state.sealed import MANIFEST, seal, size_and_hash
from deepstow.trainer.run.checkpoints import checkpoint, earlier, finished
from deepstow.trainer.run.checkpoints.checkpoint import complete, verified
from tests.helpers.checkpoints import make
from tests.helpers.tiny import LLAMA, run_config

HISTORY = [{"loss": 4.5, "step": 5}, {"loss": 3.5, "step": 10}]


def set_aside(output_dir: Path, after: Path | None = None, **training: object) -> list[str]:
    found = checkpoint.verified(after) if after else None
    return list(earlier.set_aside(run_config(LLAMA, output_dir=output_dir, **training), found))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def record(folder: Path, *losses: Mapping[str, Any]) -> None:
    lines = [*losses, {"step": 5, "sample": "a text"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"step": 1')


def export(folder: Path, step: int, of: Path | None, name: str = "export", **about: Any) -> Path:
    made = folder / name
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    seal(made, finished.KIND, finished.about(run_config(LLAMA, output_dir=folder, **about), step, of))
    return made


def further(folder: Path, name: str) -> None:
    made = folder / f"export-{name}"
    made.mkdir()
    seal(made, earlier.FURTHER, {"decided by": {"of": size_and_hash(folder / "export" / MANIFEST)[1]}})


def test_a_fresh_run_sets_the_earlier_one_aside_and_deletes_nothing_unless_that_was_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of a run that saved nothing")
    assert set_aside(tmp_path) == [] and (tmp_path / "metrics.jsonl").exists()
    for expected in ("earlier-1", "earlier-2"):
        make(tmp_path, 4)
        for name in ("metrics.jsonl", "plan.json", "facts.json"):
            (tmp_path / name).write_text("{}\n")
        for name in ("export", "export-int8", "runs", "profile"):
            (tmp_path / name).mkdir()
        (line,) = set_aside(tmp_path)
        assert line.endswith(f" are now in {tmp_path / expected}")
        assert verified(tmp_path / expected / "checkpoint-4").step == 4
        moved = {"checkpoint-4", "metrics.jsonl", "export", "export-int8", "runs", "profile"}
        assert names(tmp_path / expected) == {*moved, "plan.json", "facts.json"}
        assert complete(tmp_path) == [] and not names(tmp_path) & moved and (tmp_path / "facts.json").exists()
    (tmp_path / "export").mkdir()
    assert set_aside(tmp_path, overwrite=True) == []
    assert names(tmp_path) == {"earlier-1", "earlier-2", "plan.json", "facts.json"}


def test_a_run_that_goes_back_sets_aside_what_came_after(tmp_path: Path) -> None:
    first, *_ = (make(tmp_path, step, history=HISTORY) for step in (10, 20, 30))
    (tmp_path / "checkpoint-30" / "model.safetensors").write_bytes(b"damaged")
    record(tmp_path, *HISTORY, {"loss": 2.5, "step": 20})
    (tmp_path / "runs").mkdir()
    export(tmp_path, 30, None)
    further(tmp_path, "int8")
    (line,) = set_aside(tmp_path, first, overwrite=True)
    gone = "checkpoint-20, checkpoint-30, export, export-int8"
    assert line == f"gone back to checkpoint-10: what came after it ({gone}) is now in {tmp_path / 'earlier-1'}"
    assert names(tmp_path) == {"earlier-1", "checkpoint-10", "metrics.jsonl"}
    assert names(tmp_path / "earlier-1") == {*gone.split(", "), "metrics.jsonl", "runs"}
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "earlier-1" / "metrics.jsonl").read_bytes()
    assert set_aside(tmp_path, first) == []


def test_a_run_that_goes_on_moves_nothing(tmp_path: Path) -> None:
    """After a kill, whose records go on; longer than before, or after its end."""
    first, last = (make(tmp_path, step, history=HISTORY) for step in (10, 20))
    record(tmp_path, *HISTORY, {"loss": 1.5, "step": 25})
    export(tmp_path, 20, last)
    further(tmp_path, "int8")
    (tmp_path / "runs").mkdir()
    before = names(tmp_path)
    assert set_aside(tmp_path, last) == [] and names(tmp_path) == before
    third = make(tmp_path, 30, history=[*HISTORY, {"loss": 1.5, "step": 25}])
    assert set_aside(tmp_path, third) == [], "the export of step 20 is this run's"
    (tmp_path / "checkpoint-30").rename(tmp_path / "kept")
    assert set_aside(tmp_path, tmp_path / "kept") == [], "under a name of the user's"
    assert first.is_dir()


@pytest.mark.parametrize("how", ["elsewhere", "copied into the folder"])
def test_of_another_runs_checkpoint_all_of_this_folder_is_another_history(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = make(tmp_path / "other", 10, history=[{"loss": 4.25, "step": 5}, {"loss": 3.5, "step": 10}])
    given = [make(folder, step, history=HISTORY) for step in (5, 20)]
    record(folder, *HISTORY)
    export(folder, 5, given[0])
    if how != "elsewhere":
        other = shutil.copytree(other, folder / "checkpoint-10")
    (line,) = set_aside(folder, other)
    assert line == f"{other} is another run's: what was in {folder} before is now in {folder / 'earlier-1'}"
    assert names(folder / "earlier-1") == {"checkpoint-5", "checkpoint-20", "export", "metrics.jsonl"}
    assert names(folder) == {"earlier-1"} | ({"checkpoint-10"} if how != "elsewhere" else set())
    record(folder, {"loss": 9.0, "step": 3})
    assert bool(set_aside(folder, other)), "records of a run that has saved nothing are no history of this one"


def test_losses_that_are_no_numbers_are_a_history_too(tmp_path: Path) -> None:
    """And one that is logged after the save of its step, as at the end of an epoch, is no other history."""
    found = verified(make(tmp_path, 10, history=[{"loss": float("nan"), "step": 5}]))
    record(tmp_path, {"loss": "nan", "step": 5}, {"loss": 1.5, "step": 10})
    assert earlier.is_of(tmp_path, found)
    record(tmp_path, {"loss": "inf", "step": 5})
    assert not earlier.is_of(tmp_path, found)


def test_an_export_that_names_no_checkpoint_moves_alone(tmp_path: Path) -> None:
    """Of an earlier release, or of a step that was not saved; and what was made of another export."""
    last = make(tmp_path, 20, history=HISTORY)
    record(tmp_path, *HISTORY)
    made = export(tmp_path, 20, None)
    seal(made, finished.KIND, {"step": 20, "max_steps": 20})
    further(tmp_path, "int8")
    assert set_aside(tmp_path, last) == [
        f"export, export-int8: not known to be made of checkpoint-20, so not kept in place; now in {tmp_path}/earlier-1"
    ]
    assert names(tmp_path / "earlier-1") == {"export", "export-int8"}
    export(tmp_path, 20, last)
    (tmp_path / "export-int8").mkdir()
    (line,) = set_aside(tmp_path, last)
    assert line.startswith("export-int8: ") and (tmp_path / "export").is_dir()


def test_an_export_of_this_step_with_other_weights_is_undone(tmp_path: Path) -> None:
    last = make(tmp_path, 20, history=HISTORY)
    export(tmp_path, 20, make(tmp_path / "other", 20, history=HISTORY[:1]))
    assert names(tmp_path) >= {"export"} and "gone back to checkpoint-20" in set_aside(tmp_path, last)[0]


def test_of_a_link_the_link_moves(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "archive", 10)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint-10").symlink_to("../archive/checkpoint-10")
    assert set_aside(tmp_path / "run")
    assert verified(tmp_path / "run/earlier-1/checkpoint-10").step == 10, "a relative link still leads there"
    set_aside(tmp_path / "run", overwrite=True)
    assert verified(elsewhere).step == 10


class Killed(BaseException):
    pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_in_the_middle_is_completed_by_the_next_start(overwrite: bool, tmp_path: Path) -> None:
    """At every call that changes names, and after it: all is where it was, or all has moved."""
    things = ("checkpoint-10", "checkpoint-20", "checkpoint-30", "metrics.jsonl")
    outcomes = set()
    for number in range(0, 100, 3 if overwrite else 1):
        folder = tmp_path / str(number)
        for step in (10, 20):
            make(folder, step)
        (folder / "checkpoint-30").symlink_to(tmp_path)
        record(folder, *HISTORY)
        with pytest.MonkeyPatch.context() as patch:
            left = iter(range(number))
            for name in ("rename", "replace", "unlink", "symlink", "mkdir", "rmdir", "fsync"):
                patch.setattr(os, name, _until(left, getattr(os, name)))
            try:
                set_aside(folder, overwrite=overwrite)
                killed = False
            except Killed:
                killed = True
        earlier.complete(folder)
        checkpoint.clear(folder)
        there = {name for name in things if os.path.lexists(folder / name)}
        assert there in (set(), set(things)), (number, there)
        moved = folder / "earlier-1"
        assert overwrite or bool(there) is not moved.exists()
        assert overwrite or there or names(moved) == set(things), "and no list of names is left"
        outcomes.add(bool(there))
        if not killed:
            break
    assert outcomes == {True, False} and number > 10


def _until(left: Any, call: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return call(*args, **kwargs)

    return counted


def test_a_list_of_names_that_leads_out_of_the_folder_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("of the user")
    marker = tmp_path / "run" / "earlier-1" / earlier.MOVING
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps(["../mine"]))
    with pytest.raises(ValueError, match=r"'\.\./mine', which is not in"):
        earlier.complete(tmp_path / "run")
    assert (tmp_path / "mine").exists()


# Whether a run is over


def test_a_run_is_over_where_its_export_is_whole_and_of_the_checkpoint(tmp_path: Path) -> None:
    last, other = make(tmp_path, 6, history=HISTORY), make(tmp_path / "other", 6)
    config = run_config(LLAMA, output_dir=tmp_path, max_steps=6)
    assert finished.before(config, verified(last)) is None, "there is none"
    made = export(tmp_path, 6, last, max_steps=6)
    line = f"finished before, at step 6: {tmp_path}/export is whole and of that step; nothing was changed"
    assert finished.before(config, verified(last)) == line
    assert finished.before(config, verified(other)) is None, "the same step with other weights"
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    often["data"] = {"eval_fraction": 0.5}
    assert finished.before(run_config(LLAMA, output_dir=tmp_path, max_steps=6, **often), verified(last)) == line
    for key, value in (
        ("max_steps", 8), ("num_train_epochs", 2), ("early_stopping_patience", 3), ("load_best_model_at_end", True),
    ):  # fmt: skip
        changed = {"max_steps": 6, **often, key: value}
        assert finished.before(run_config(LLAMA, output_dir=tmp_path, **changed), verified(last)) is None, key
    (made / "model.safetensors").write_bytes(b"weighty")
    assert finished.before(config, verified(last)) is None


def test_an_export_without_a_checkpoint_is_nobodys(tmp_path: Path) -> None:
    last = make(tmp_path, 6)
    made = export(tmp_path, 6, None, max_steps=6)
    config = run_config(LLAMA, output_dir=tmp_path, max_steps=6)
    assert finished.before(config, verified(last)) is None
    seal(made, finished.KIND, {key: value for key, value in finished.about(config, 6).items() if key != finished.OF})
    assert finished.before(config, verified(last)) is None


def test_epochs_of_other_batches_have_other_steps(tmp_path: Path) -> None:
    last = make(tmp_path, 6)
    export(tmp_path, 6, last)
    config, key = run_config(LLAMA, output_dir=tmp_path), "training.per_device_train_batch_size"
    assert finished.before(config, verified(last))
    assert finished.before(config, verified(last), {"training.learning_rate": "said"})
    assert finished.before(config, verified(last), {key: "batch_size"}) is None
