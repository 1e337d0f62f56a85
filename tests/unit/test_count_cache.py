"""The cache of counts: what a file is valid for, and that a second plan loads no torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepstow.launch.plan import main
from deepstow.trainer.model.count_cache import cached, name_of
from deepstow.trainer.planning.facts import ModelCount, asked, count_model
from deepstow.trainer.recipes.distill import DistillSection
from tests.helpers.tiny import LLAMA, run_config

ROOT = Path(__file__).resolve().parents[2]
NOTHING = ModelCount(units=(), forward_flops=7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where counts are kept."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache/deepstow/counts"


def test_counted_once_and_read_back_as_it_was(folder: Path) -> None:
    config = run_config(strategies={"offload": {}, "linear": {}})
    first = cached(config, ModelCount, lambda: count_model(config))
    assert first.params and first.units[1].choices is not None

    def never() -> ModelCount:
        raise AssertionError("counted again")

    assert cached(config, ModelCount, never) == first
    (file,) = folder.iterdir()
    file.write_text("broken")
    assert cached(config, ModelCount, lambda: NOTHING) == NOTHING
    assert cached(config, ModelCount, never) == NOTHING


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {**LLAMA, "hidden_size": 64}},
        {"per_device_train_batch_size": 7},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"data": {"max_length": 9}},
        {"strategies": {"offload": {}}},
    ],
    ids=str,
)
def test_another_question_is_another_name(changes: dict[str, Any]) -> None:
    assert name_of(run_config(**changes)) != name_of(run_config())
    small = run_config(strategies={"offload": {"gpu_memory": "1GiB"}}, learning_rate=1e-3)
    assert name_of(small) == name_of(run_config(strategies={"offload": {}})), "what changes no count"


def test_what_a_teacher_is_asked_is_in_the_name() -> None:
    asked = [DistillSection(teacher="one", on=on) for on in ("logits", "hidden", "both")]
    assert len({name_of(run_config().model_copy(update={"distill": each})) for each in asked}) == 3


def test_strategies_that_only_ask_for_more_lists_share_a_count() -> None:
    """Each gets from it what it would have counted itself."""
    strategies: Any = {"pipeline": {"stages": 2}, "recompute": {"policy": "selective"}}
    plain, asking = run_config(), run_config(strategies=strategies)
    assert name_of(plain) == name_of(asking)
    whole = count_model(plain)
    assert whole == count_model(asking) and whole.params
    assert asked(whole, asking.strategies) == whole
    assert asked(whole, plain.strategies).params == ()


def test_a_folder_is_known_by_its_config(tmp_path: Path) -> None:
    names = set()
    for content in ("{}", '{"hidden_size": 8}'):
        (tmp_path / "config.json").write_text(content)
        names.add(name_of(run_config(None, model={"name_or_path": str(tmp_path)})))
    assert len(names) == 2 and {lasts for _, lasts in names} == {True}


def test_a_name_on_the_hub_is_counted_once_in_a_process(folder: Path) -> None:
    """Another process counts again, as nothing is written; other options are another question."""
    calls = []
    for length in (16, 16, 24):
        config = run_config(None, model={"name_or_path": "owner/of-this-test"}, data={"max_length": length})
        cached(config, int, lambda: calls.append(1) or len(calls))
    assert len(calls) == 2 and not folder.exists()


def test_the_second_plan_loads_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one is made in this process."""
    words = ["--full", "--config", "configs/offload.yaml", "--profile", "h100-pcie5"]
    words += ["model.config.num_hidden_layers=2", "strategies.offload.gpu_memory=6GiB"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert main(words) == 0
    first = capsys.readouterr().out
    code = (
        f"import sys; from deepstow.launch.plan import main; code = main({words!r}); "
        "print('LOADED', sorted({'torch', 'transformers'} & sys.modules.keys())); sys.exit(code)"
    )
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout == f"{first}LOADED []\n"
    for said in ("address on the device", "simulated step:", "on the critical path", "what would change it most"):
        assert said in first, said
