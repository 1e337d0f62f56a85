"""``deepstow init``: what it writes can be planned and says what was fitted; what is wrong is one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepstow.launch import init, plan
from deepstow.trainer.config.load import load
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.model import hub
from deepstow.trainer.planning import fit
from deepstow.trainer.planning.fit import FitRow
from deepstow.trainer.run import first_config
from deepstow.trainer.run.first_config import STARTS
from tests.helpers.tiny import LLAMA

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
QUICK = ("lora",)
MODELS = dict.fromkeys(STARTS, LLAMA) | {"classification": BERT, "embedding": BERT, "seq2seq": T5}
ROWS: Mapping[str, dict[str, Any]] = {
    "classification": {"text": "a", "label": "good"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    saved("model", LLAMA)
    return tmp_path


def saved(name: str, config: Mapping[str, Any]) -> None:
    Path(name).mkdir(exist_ok=True)
    Path(name, "config.json").write_text(json.dumps(config))


def rows(name: str, *given: Mapping[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in given))
    return name


def written(*words: str) -> RunConfig:
    assert init.main([*words, "--out", "out.yaml"]) == 0
    return load("out.yaml")


@pytest.mark.parametrize(
    "task", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in STARTS]
)
def test_what_is_written_for_each_task_is_a_plan(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved("model", MODELS[task])
    config = written(task, "--model", "model", "--card", "rtx4090")
    said = capsys.readouterr().out.splitlines()
    assert (
        "on NVIDIA GeForce RTX 4090: fits: " in said[0] and said[-1] == "next:       deepstow train --config out.yaml"
    )
    assert said[1].startswith("out.yaml: put your rows into my.jsonl")
    assert plan.main(["--config", "out.yaml", "--profile", "rtx4090"]) == 0
    assert config.training.output_dir == "runs/out" and config.training.bf16 and not config.strategies
    text = Path("out.yaml").read_text()
    assert text.startswith(f"# Made by: deepstow init {task} --model model --card rtx4090 --out out.yaml\n# On NVIDIA")
    assert f"learning_rate: {STARTS[task].rate:.0e}".replace("e-0", "e-") in text


def test_the_planner_fits_it_to_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows as many as fit without strategies; then one row, and what saves memory."""
    large = {**LLAMA, "hidden_size": 4096, "intermediate_size": 32768, "num_attention_heads": 32}
    saved("model", large | {"vocab_size": 32000, "max_position_embeddings": 512})
    config = written("--model", "model", "--card", "rtx3060")
    assert "offload" in config.strategies and config.training.per_device_train_batch_size == 1
    assert config.training.gradient_accumulation_steps == 8 and config.data.max_length == 512
    assert config.model.lora is None and "host" in capsys.readouterr().out
    Path("out.yaml").unlink()
    saved("model", large | {"vocab_size": 150_000, "max_position_embeddings": 1024})
    adapters = written("lora", "--model", "model", "--card", "rtx3060")
    assert not adapters.strategies and adapters.model.dtype == "bfloat16" and adapters.model.lora is not None
    training = adapters.training
    assert 1 < training.per_device_train_batch_size < 8
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 8


def test_rows_complete_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_config, "_fitted", lambda *_: FitRow())
    config = written("--model", "model", "--data", rows("a.jsonl", ROWS["sft"]), "--card", "cpu")
    assert config.data.chat_template == "chatml" and config.data.assistant_only_loss and not config.training.bf16
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    Path("out.yaml").unlink()
    config = written("--model", "model", "--data", "a.jsonl", "--card", "t4")
    assert config.data.chat_template is None and config.data.assistant_only_loss and config.training.fp16
    labels = (ROWS["classification"] | {"label": label} for label in ("good", "bad", "good"))
    saved("model", BERT)
    Path("out.yaml").unlink()
    config = written("classification", "--model", "model", "--data", rows("b.jsonl", *labels), "--card", "cpu")
    assert config.model.labels == ["bad", "good"]


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "no network")
    config = written("qlora", "--model", "an-owner/a-model", "--card", "rtx4090")
    assert config.model.name_or_path == "an-owner/a-model" and config.model.quantization_config is not None
    first, _, last = capsys.readouterr().out.splitlines()
    assert first.startswith("out.yaml: an-owner/a-model cannot be read here (no network), so nothing was fitted")
    assert last == "next:       deepstow fit --config out.yaml --profile rtx4090"
    assert "\n# Not fitted to a card: deepstow fit --config out.yaml " in Path("out.yaml").read_text()


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_saving", list)
    saved("model", {**LLAMA, "hidden_size": 32768, "intermediate_size": 65536})
    written("--model", "model", "--card", "rtx3060")
    first, _, last = capsys.readouterr().out.splitlines()
    assert "does not fit: " in first and last == "next:       deepstow fit --config out.yaml --profile rtx3060"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sfft", "--model", "model"], "sfft: no such task; there are sft, lora, qlora"),
        (["--model", "model", "--card", "rtx490"], "unknown machine profile 'rtx490': known are "),
        (["--model", "model", "--data", "min.jsonl"], "--data min.jsonl: there is no such file; did you mean 'mine"),
        (["--model", "./modl"], "--model ./modl: there is no such folder; did you mean 'model'?"),
        (["--model", "run"], "--model run: is the folder of a run; name its export, run/export"),
        (["--model", "empty"], "--model empty: the folder holds no model"),
        (["--model", "model", "--out", "there.yaml"], "--out there.yaml: is there already; name another file"),
        (["--model", "model", "--out", "no/x.yaml"], "--out no/x.yaml: No such file or directory"),
        (["--model", "model/config.json"], "--model model/config.json: is a file; name the folder of a model saved"),
        (["dpo", "--model", "model", "--data", "mine.jsonl"], "mine.jsonl: task dpo needs "),
        (["seq2seq", "--model", "model"], 'task = "seq2seq": llama models are not for it'),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("run/export").mkdir(parents=True)
    Path("there.yaml").write_text("mine")
    rows("mine.jsonl", {"text": "a"})
    assert init.main(["--card", "cpu", *words]) in (2, 3)
    found = capsys.readouterr()
    lines = [line for line in found.err.splitlines() if not line.startswith("fitting ")]
    assert len(lines) == 1 and lines[0].startswith(said) and not found.out
    assert Path("there.yaml").read_text() == "mine" and not Path("mine.yaml").exists()
