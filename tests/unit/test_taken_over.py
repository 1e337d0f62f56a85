"""What a resumed run takes over of the state in its checkpoint: its own best checkpoint, and never another run's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from deepstow.strategies.state.sealed import seal
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.run import resuming
from deepstow.trainer.run.callbacks import EarlyStopping
from deepstow.trainer.run.checkpoint import KIND, Manifest
from tests.helpers.checkpoints import about, make
from tests.helpers.tiny import LLAMA, run_config


def after(folder: Path, best: str | None, said_other: str) -> tuple[TrainerState, list[str]]:
    state = TrainerState(max_steps=100, save_steps=50, best_metric=4.5, best_model_checkpoint=best, best_global_step=6)
    args: Any = SimpleNamespace(output_dir=str(folder), process_index=0, logging_steps=1, eval_steps=7, save_steps=0.1)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "write_line", said.append)
        resuming.TakenOver(said_other).on_train_begin(args, state, None)
    assert (state.save_steps, state.eval_steps) == (10, 7), (
        "the intervals are the config's, a share is one of all steps"
    )
    return state, said


def test_the_bar_stays_and_its_checkpoint_is_found_here(tmp_path: Path) -> None:
    """Hugging Face forgets the path if there is no such folder any more; a worse evaluation is not best for that."""
    for found in (None, str(tmp_path / "checkpoint-6")):
        for best in (None, "/elsewhere/run/checkpoint-6"):
            state, said = after(tmp_path, best, "")
            assert (state.best_metric, state.best_model_checkpoint, said) == (4.5, found, [])
        (tmp_path / "checkpoint-6").mkdir(exist_ok=True)


def test_what_is_not_this_runs_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-6").mkdir()
    state, said = after(tmp_path, str(tmp_path / "checkpoint-6"), "is another run's")
    assert (state.best_metric, state.best_model_checkpoint, state.best_global_step) == (None, None, None)
    assert said == ["the best evaluation so far, of step 6, is another run's: it is forgotten"]


def test_the_count_of_another_run_does_not_stop_this_one() -> None:
    state = TrainerState()
    state.stateful_callbacks = {"EarlyStopping": {"attributes": {"early_stopping_patience_counter": 2}}}
    assert EarlyStopping(2).over(state) and not EarlyStopping(2, another=True).over(state)


@pytest.mark.parametrize(
    ("inside", "saved", "why"),
    [
        (True, {"metric_for_best_model": "loss"}, ""),
        (False, {"metric_for_best_model": "loss"}, "is another run's"),
        (True, {"metric_for_best_model": "loss", "greater_is_better": True}, "was chosen by another greater_is_better"),
    ],
)
def test_whose_the_best_one_is(inside: bool, saved: dict[str, Any], why: str, tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path / "own", metric_for_best_model="loss")
    manifest = SimpleNamespace(run=SimpleNamespace(config={"training": saved}))
    folder = tmp_path / ("own" if inside else "other") / "checkpoint-6"
    resumed: Any = SimpleNamespace(path=folder, found=SimpleNamespace(manifest=manifest), changed=frozenset())
    assert resuming.other(resumed, config) == why
    resumed.changed = {"data.eval_path": "data"}
    assert resuming.other(resumed, config) == (why or "was one of other data")
    assert resuming.other(None, config) == ""


@pytest.mark.parametrize("more", [0, 1, None])
def test_another_number_of_threads_is_said(more: int | None, tmp_path: Path) -> None:
    """A checkpoint of a release that wrote no number is not said to have had another."""
    saved = None if more is None else torch.get_num_threads() + more
    run = about(run_config(LLAMA, output_dir=tmp_path).tree()).model_copy(update={"threads": saved})
    folder = make(tmp_path, 4, marked=False)
    seal(folder, KIND, Manifest(step=4, finite=True, run=run).model_dump(mode="json", exclude_none=saved is None))
    resumed = resuming.decide(run_config(LLAMA, output_dir=tmp_path, resume_from_checkpoint="auto"), Ranks())
    assert resumed is not None
    said = [line for line in resumed.said if "OMP_NUM_THREADS" in line]
    assert len(said) == bool(more) and all(line.endswith(f"OMP_NUM_THREADS={saved} keeps it") for line in said)
