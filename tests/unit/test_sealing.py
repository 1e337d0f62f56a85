"""A save is sealed beside training, and settled before anything needs it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.execution.base import Execution
from deepstow.trainer.run.checkpoints.checkpoint import WRITING, verified
from tests.helpers.moves import made
from tests.helpers.tiny import LLAMA, run_config
from tests.helpers.worlds import run_counted
from tests.unit.test_trainer import UNEVEN

pytestmark = pytest.mark.ranks
OFFLOAD = {"offload": {"site": "host", "weights": "streamed"}}
SAVE, STEPS = 2, 4


def config_in(folder: Path, strategies: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    plain: dict[str, Any] = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVE, "save_total_limit": 1,
        "per_device_train_batch_size": 2,
    }  # fmt: skip
    return run_config(LLAMA, output_dir=folder, strategies=strategies or {}, **plain | training)


def train(trainer: Any, *at_step_end: Callable[[int], None], error: type[BaseException] | None = None) -> Any:
    """The trainer after its training, which has ended with ``error`` where one is given."""
    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for look in at_step_end:
                look(state.global_step)

    trainer.add_callback(Look())
    with pytest.raises(error) if error else nullcontext():
        trainer.train()
    trainer.accelerator.free_memory()
    return trainer


def commits_after(wait: Callable[[], object]) -> None:
    """Every seal of this process waits first."""
    from deepstow.trainer.run.checkpoints import saving

    commit = saving.commit

    def late(*args: Any) -> None:
        wait()
        commit(*args)

    saving.commit = late


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint*"))


def sealed_late(ranks: Ranks, config: RunConfig) -> dict[int, list[str]]:
    """What is in the folder after each step; the first seal does not begin before the step after its save is over."""
    folder, may_begin = Path(config.training.output_dir), threading.Event()
    seen: dict[int, list[str]] = {}

    def wait() -> None:
        assert may_begin.wait(60.0), "training waits for the seal"

    def look(step: int) -> None:
        seen[step] = there(folder)
        if step > SAVE:
            may_begin.set()

    commits_after(wait)
    train(made(ranks, config, UNEVEN), look)
    return {**seen, STEPS + 1: there(folder)}


def test_training_goes_on(tmp_path: Path) -> None:
    seen = run_world(1, sealed_late, config_in(tmp_path, OFFLOAD))
    assert seen[SAVE + 1] == [WRITING], "sealed in the step after the save, or not at all"
    assert seen[STEPS + 1] == [f"checkpoint-{STEPS}"], "the run does not end before its last save"
    assert verified(tmp_path / f"checkpoint-{STEPS}")


def interrupted(ranks: Ranks, config: RunConfig) -> list[str]:
    """What is left if Ctrl-C comes while the run waits for a seal."""
    from deepstow.trainer.run.checkpoints import saving

    together = saving.together

    def interrupt(work: Any) -> Any:
        if trainer._saving is not None:
            saving.together = together
            raise KeyboardInterrupt
        return together(work)

    commits_after(lambda: threading.Event().wait(1.0))  # so the seal is not done when the run is interrupted
    saving.together = interrupt
    trainer = made(ranks, config, UNEVEN)
    train(trainer, error=KeyboardInterrupt)
    return there(Path(config.training.output_dir))


def test_an_interruption_while_it_is_settled_loses_no_save(tmp_path: Path) -> None:
    assert run_world(1, interrupted, config_in(tmp_path)) == [f"checkpoint-{SAVE}"]


def looked_at(ranks: Ranks, config: RunConfig) -> tuple[list[bool], list[str]]:
    """Whether a callback of the user's finds each checkpoint when it hears of it, and what is said if older ones cannot
    be deleted.
    """
    from transformers import TrainerCallback

    from deepstow.trainer.run import trainer as trainer_file
    from deepstow.trainer.run.checkpoints import checkpoint

    class Upload(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "manifest.json").is_file())

    def stubborn(folder: Path) -> None:
        if folder.name == checkpoint.DELETED and folder.exists():
            raise OSError(39, "Directory not empty")
        remove(folder)

    found, said, remove = list[bool](), list[str](), checkpoint.remove
    checkpoint.remove, trainer_file.write_line = stubborn, said.append
    trainer = made(ranks, config, UNEVEN)
    trainer.add_callback(Upload())
    train(trainer)
    return found, said


def test_callbacks_find_the_checkpoint_and_what_cannot_be_deleted_is_no_failed_save(tmp_path: Path) -> None:
    found, (said,) = run_world(1, looked_at, config_in(tmp_path))
    assert found == [True, True]
    assert said == f"{tmp_path}: older checkpoints could not be deleted: [Errno 39] Directory not empty"
    assert verified(tmp_path / f"checkpoint-{STEPS}")


BEST = {
    "eval_strategy": "steps", "eval_steps": SAVE, "load_best_model_at_end": True, "metric_for_best_model": "loss",
}  # fmt: skip


def evaluated(ranks: Ranks, config: RunConfig, where: str) -> str:
    """The newest checkpoint of a run with evaluations whose disk is full at the last save, while writing or sealing."""

    trainer = made(ranks, config, UNEVEN)
    save_model = trainer.save_model

    def fill(now: str) -> None:
        if where == now and trainer.state.global_step == STEPS and ranks.is_first:
            raise OSError(28, "No space left on device")

    def full(*args: Any, **kwargs: Any) -> None:
        if not kwargs:  # into a draft
            fill("writing")
        save_model(*args, **kwargs)

    commits_after(lambda: fill("sealing"))
    trainer.save_model = full
    return str(train(trainer).newest)


@pytest.mark.parametrize(
    ("where", "ranks", "every"), [("sealing", 1, SAVE), ("sealing", 1, STEPS), ("writing", 2, SAVE)]
)
def test_a_full_disk_where_there_is_a_best_checkpoint(where: str, ranks: int, every: int, tmp_path: Path) -> None:
    """All ranks go on, to the best of those that are saved, or without one."""
    data = {"max_length": 24, "eval_fraction": 0.1}
    config = config_in(tmp_path, data=data, save_steps=every, ddp_timeout=20, **{**BEST, "eval_steps": every})
    newest = run_counted(ranks, evaluated, config, where, timeout_s=300.0)
    assert newest == ("" if every == STEPS else f"checkpoint-{SAVE}")


@pytest.mark.parametrize(
    ("saved", "best", "loaded", "said"),
    [
        ("checkpoint-2", 2, "checkpoint-2", "the weights of step 2, of the best evaluation"),
        ("checkpoint-2", 6, None, ""),
        (
            "checkpoint-2",
            4,
            "checkpoint-2",
            "the weights of step 2, since that of the best evaluation, 4, was not saved",
        ),
        (None, 4, None, "the weights of step 6, since that of the best evaluation, 4, was not saved"),
        (None, 0, None, "the weights of step 6, since that of the best evaluation, 0, was not saved"),
    ],
)
def test_a_best_evaluation_without_a_checkpoint(
    saved: str | None, best: int, loaded: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a full disk, or an evaluation before the first step: no worse weights are loaded, and none are praised."""
    from transformers import TrainerState

    from deepstow.trainer.run import trainer as trainer_file
    from deepstow.trainer.run.callbacks.reports import of_best

    found: list[str] = []
    monkeypatch.setattr(trainer_file.checkpoint, "verified", lambda folder: None)
    monkeypatch.setattr(trainer_file.training_state, "load_weights", lambda of, folder: found.append(folder.name))
    state = TrainerState(global_step=6, best_global_step=best, best_model_checkpoint=saved and str(tmp_path / saved))
    trainer: Any = SimpleNamespace(settle=lambda: None, state=state, execution=Execution())
    trainer_file.Trainer.load_best(trainer)
    assert found == ([loaded] if loaded else [])
    assert of_best(config_in(tmp_path, data={"eval_fraction": 0.1}, **BEST), state, "{}") == said
