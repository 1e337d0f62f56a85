"""A run that is refused over a finished one leaves its bytes and times as they were, whatever refuses it, and where."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.state.sealed import read, seal
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop, Stopped
from deepstow.trainer.errors import ConfigError, DataError, ExitCode, UserError
from deepstow.trainer.run import building, data
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.checkpoints import checkpoint, training_state
from deepstow.trainer.run.checks import CHECKS, Before
from deepstow.trainer.run.session import run
from deepstow.trainer.run.trainer import Trainer
from tests.e2e.commands import write_config

FRESH, AUTO = "training.resume_from_checkpoint=false", "training.resume_from_checkpoint=auto"
BACK = "training.resume_from_checkpoint={}/checkpoint-2"
EXCEPTED = ("exit.json", "run.lock")  # and what is kept by content, which is added to
ADDED = ("data", "tokenizer-", "pruned-")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a config and its finished run, which has all that a run may write."""
    folder = tmp_path_factory.mktemp("home")
    model = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    training = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "use_cpu": True, "report_to": "tensorboard",
        "profile": {"steps": [2, 3]},
    }  # fmt: skip
    write_config(folder, model={"config": model}, data={"max_length": 32}, training=training)
    assert start(folder, folder / "run") == ExitCode.FINISHED
    shutil.copytree(folder / "run" / "export", folder / "run" / "export-torch")
    written = {path.name for path in (folder / "run").iterdir()}
    assert written == {
        "checkpoint-2", "checkpoint-4", "config.yaml", "ds_config.json", "export", "export-torch", "facts.json",
        "metrics.jsonl", "plan.json", "plan.txt", "profile", "runs", "tokenizer",
    }  # fmt: skip
    return folder


def start(home: Path, folder: Path, *overrides: str) -> int:
    """As ``launch/train.py`` does it."""
    try:
        return run(load(home / "config.yaml", [f"training.output_dir={folder}", *overrides]), Ranks(), Stop())
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(home / "run", tmp_path / "run")


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name not in EXCEPTED
    }


def refused(home: Path, folder: Path, *overrides: str) -> int:
    """The exit code of a run that changes nothing."""
    before = state(folder)
    code = start(home, folder, *overrides)
    after = state(folder)
    added = [name for name in after.keys() - before.keys() if not name.startswith(ADDED)]
    changed = [name for name in before if after.get(name) != before[name]]
    assert (added, changed) == ([], [])
    return code


OVERRIDES = {
    "a key": (["training.max_stepz=3"], "training.max_stepz"),
    "no hub": (["training.push_to_hub=true"], "training.push_to_hub = true: the hub cannot be reached"),
    "other layers": ([AUTO, "model.config.num_hidden_layers=2"], "model.config.num_hidden_layers = 2: "),
    "other rows": ([AUTO, "data.max_length=16"], "allow it with training.allow_change: [max_length]"),
    "no such checkpoint": (["training.resume_from_checkpoint=no/checkpoint-3"], "there is no such folder"),
    "no rows": ([FRESH, "data.path=absent.jsonl"], "data.path: absent.jsonl does not exist"),
    "another tokenizer": (
        [FRESH, "model.tokenizer.vocab_size=400", "prune={method: magnitude, sparsity: 0.5, modules: [none]}"],
        "prune.modules",
    ),
    "no room in the plan": ([FRESH, "strategies.offload={gpu_memory: 1KiB}"], "strategies.offload.gpu_memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERRIDES)
def test_by_an_override(case: str, home: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, said = OVERRIDES[case]
    assert refused(home, folder, *overrides) in (ExitCode.CONFIG, ExitCode.DATA)
    assert said in capsys.readouterr().err


# Each place that may still say no, in the order of a run, the error that ends it there, and what it began with.
PLACES: dict[str, tuple[Any, str, BaseException, int, str]] = {
    "rows": (data, "read_data", DataError("no"), ExitCode.DATA, FRESH),
    "memory of the machine": (CHECKS[Before.SPENDING], "memory", ConfigError("no"), ExitCode.CONFIG, FRESH),
    "a tracker": (CHECKS[Before.WEIGHTS], "trackers", ConfigError("no"), ExitCode.CONFIG, FRESH),
    "the hub": (CHECKS[Before.WEIGHTS], "repository", ConfigError("no"), ExitCode.CONFIG, BACK),
    "a recipe": (runs, "before_training", ConfigError("no"), ExitCode.CONFIG, FRESH),
    "weights too large": (building, "make_model", MemoryError("no"), ExitCode.OUT_OF_MEMORY, BACK),
    "a signal": (building, "make_model", Stopped("no"), ExitCode.PREEMPTED, FRESH),
    "an optimizer": (Trainer, "create_optimizer", ValueError("no"), ExitCode.FAILED, FRESH),
    "the state of a checkpoint": (training_state, "load", training_state.Misfit("no"), ExitCode.CONFIG, BACK),
}


@pytest.mark.parametrize("place", PLACES)
def test_at_every_place(place: str, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, error, code, begins = PLACES[place]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    (monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr)(where, name, fail)
    assert refused(home, folder, begins.format(folder), "training.learning_rate=0.1") == code


def other_shapes(folder: Path) -> None:
    found, about = checkpoint.read(folder)
    other = about.run.model_copy(update={"model": about.run.model.model_copy(update={"shapes": "of another model"})})
    seal(folder, found.kind, about.model_copy(update={"run": other}).model_dump(mode="json"))


def no_moments(folder: Path) -> None:
    """Of the optimizer, in a checkpoint that is sealed anew."""
    for path in (folder / "optimizer").glob("*.safetensors"):
        path.unlink()
    found = read(folder, checkpoint.KIND)
    seal(folder, found.kind, found.about)


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "said"),
    [(other_shapes, "other names or shapes"), (no_moments, "optimizer")],
)
def test_by_a_checkpoint(
    change: Callable[[Path], None], said: str, home: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "checkpoint-2")
    assert refused(home, folder, BACK.format(folder), "training.learning_rate=0.1") == ExitCode.CONFIG
    assert said in capsys.readouterr().err
