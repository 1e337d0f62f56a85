"""A finished run that is started again from an earlier step, or from another run's: what it leaves is of this run.

Whole runs in this process, tiny; each expected result is that of a run in a folder of its own.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.state.sealed import read, seal
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop, Stopped
from deepstow.trainer.errors import ExitCode
from deepstow.trainer.run import building
from deepstow.trainer.run.checkpoints import checkpoint, finished
from deepstow.trainer.run.session import run
from deepstow.trainer.run.trainer import Trainer
from tests.e2e.commands import digest, metrics, write_config

STEPS = 6
CHANGED = "training.learning_rate=0.1"
AUTO = "training.resume_from_checkpoint=auto"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a finished run of six steps with checkpoints 2, 4 and 6, its folder, and that of another run."""
    folder = tmp_path_factory.mktemp("home")
    model = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    training = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "use_cpu": True, "report_to": "tensorboard",
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    base = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    write_config(folder, model={"config": {**base, **model}}, data={"max_length": 32}, training=training)
    start(folder, folder / "run")
    start(folder, folder / "other", "training.seed=7", "data.eval_fraction=0.1")
    return folder


def start(home: Path, folder: Path, *overrides: str, code: int = ExitCode.FINISHED) -> None:
    given = [f"training.output_dir={folder}", *overrides]
    assert run(load(home / "config.yaml", given), Ranks(), Stop()) == code


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(home / "run", tmp_path / "run")


@pytest.fixture(scope="module")
def expected(home: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of steps 5 and 6 with another learning rate, in a folder in which nothing was before."""
    folder = tmp_path_factory.mktemp("expected")
    start(home, folder / "run", CHANGED, from_step(home / "run", 4))
    found = digest(folder / "run" / "export")
    assert found != digest(home / "run" / "export")
    return found


def from_step(folder: Path, step: int) -> str:
    return f"training.resume_from_checkpoint={folder / f'checkpoint-{step}'}"


def losses(folder: Path) -> dict[int, float]:
    found = [(record["step"], record["loss"]) for record in metrics(folder) if "loss" in record]
    assert len(found) == len(dict(found)), "one history"
    return dict(found)


def origin(folder: Path) -> Any:
    return finished.said_by(folder / "export")[finished.OF]


def curves(folder: Path) -> list[Path]:
    return list((folder / "runs").rglob("*tfevents*"))


def test_with_another_learning_rate(
    home: Path, folder: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "plan.json", "config.yaml", "facts.json")}
    start(home, folder, CHANGED, from_step(folder, 4), "training.overwrite=true")
    said, aside = capsys.readouterr().out, folder / "earlier-1"
    assert f"gone back to checkpoint-4: what came after it (checkpoint-6, export) is now in {aside}" in said
    assert "finished before" not in said and digest(folder / "export") == expected
    assert digest(aside / "export") == digest(home / "run" / "export") and (aside / "checkpoint-6").is_dir()
    assert {name: (aside / name).read_bytes() for name in old} == old and curves(aside) and len(curves(folder)) == 1
    assert "learning_rate: 0.1\n" in (folder / "config.yaml").read_text()
    before, after = losses(aside), losses(folder)
    assert [*after] == list(range(1, STEPS + 1))
    assert all((before[step] == after[step]) is (step <= 5) for step in after), "the rate acts from step 5 on"
    assert origin(folder) == checkpoint.digest(folder / "checkpoint-6") != origin(aside)
    start(home, folder, CHANGED, AUTO)
    assert capsys.readouterr().out.startswith(f"finished before, at step {STEPS}: ")


def test_after_newer_ones_were_deleted(home: Path, folder: Path, expected: str) -> None:
    """Also if the run ends before its first save: what was undone is not gone on from."""
    shutil.rmtree(folder / "checkpoint-6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "training_step", _interrupted)
        start(home, folder, CHANGED, AUTO, code=ExitCode.PREEMPTED)
    assert not (folder / "export").exists() and (folder / "earlier-1" / "export").is_dir()
    assert [*losses(folder)] == [1, 2, 3, 4]
    start(home, folder, CHANGED, AUTO)
    assert digest(folder / "export") == expected and [*losses(folder)] == list(range(1, STEPS + 1))
    assert not (folder / "earlier-2").exists()


def _interrupted(*args: Any, **kwargs: Any) -> None:
    raise Stopped("ended in the middle of a step")


def test_by_a_link(home: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of the run is its own under another name, too."""
    (tmp_path / "linked").symlink_to(folder / "checkpoint-4")
    start(home, folder, f"training.resume_from_checkpoint={tmp_path / 'linked'}")
    assert "another run's" not in capsys.readouterr().out
    assert (folder / "checkpoint-2").is_dir() and (folder / "earlier-1" / "checkpoint-6").is_dir()


def test_a_checkpoint_that_goes_while_it_is_read(home: Path, folder: Path, tmp_path: Path) -> None:
    """As where another run deletes it: one line, and nothing of it is left behind."""
    made = building.make_trainer

    def late(run: Any) -> Any:
        shutil.rmtree(folder / "checkpoint-4")
        return made(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_trainer", late)
        start(home, tmp_path / "new", from_step(folder, 4), code=ExitCode.DISK)
    assert not [*(tmp_path / "new").glob("checkpoint-*")]


@pytest.mark.parametrize("step", [4, STEPS])
def test_another_runs_checkpoint(step: int, home: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle, or at its end, when its export is made without a step. Its seed is another one."""
    other = home / "other"
    overrides = ["training.seed=7", "data.eval_fraction=0.1", from_step(other, step)]
    start(home, folder, *overrides)
    said = capsys.readouterr().out
    assert f"{other / f'checkpoint-{step}'} is another run's: what was in {folder} before is now in" in said
    assert digest(folder / "export") == digest(other / "export") != digest(home / "run" / "export")
    assert losses(folder) == losses(other), "the checkpoint has the history of its steps"
    aside = folder / "earlier-1"
    assert {path.name for path in aside.glob("checkpoint-*")} == {f"checkpoint-{each}" for each in (2, 4, 6)}
    assert losses(aside) == losses(home / "run") and digest(aside / "export") == digest(home / "run" / "export")
    last = folder / "checkpoint-6" if step < STEPS else other / "checkpoint-6"
    assert origin(folder) == checkpoint.digest(last)
    if step == STEPS:
        start(home, folder, *overrides)
        assert "finished before, at step 6: " in capsys.readouterr().out, "by its content"


def test_a_last_step_that_is_not_saved(home: Path, folder: Path, expected: str) -> None:
    """Nobody can say later whether its export is this run's, so it is made again and again."""
    unsaved = [CHANGED, "training.save_strategy=no"]
    start(home, folder, *unsaved, from_step(folder, 4))
    assert digest(folder / "export") == expected and origin(folder) is None
    start(home, folder, *unsaved, "training.learning_rate=0.05", AUTO)
    assert digest(folder / "earlier-2" / "export") == expected != digest(folder / "export")


def test_an_export_of_a_release_that_named_no_checkpoint(
    home: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = dict(read(folder / "export", finished.KIND).about)
    former = {key: said[key] for key in ("step", "max_steps", "num_train_epochs", "load_best_model_at_end")}
    seal(folder / "export", finished.KIND, former)
    start(home, folder, AUTO)
    out = capsys.readouterr().out
    aside = folder / "earlier-1"
    assert f"export: not known to be made of checkpoint-6, so not kept in place; now in {aside}\n" in out
    assert "train_loss" not in out and digest(folder / "export") == digest(aside / "export")
    assert origin(folder) == checkpoint.digest(folder / "checkpoint-6") and losses(folder) == losses(home / "run")
