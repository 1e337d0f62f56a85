"""A run through a config, by the stock Trainer and Accelerate, on a kind of device that they do not know themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepstow.launch.train import main
from deepstow.trainer.errors import ExitCode
from tests.e2e.commands import metrics, write_config

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {"model_type": "llama", "num_hidden_layers": 3, "max_position_embeddings": 64, **TINY}
OFFLOAD = {"site": "streamed", "weights": "streamed", "gradients": "host"}


def config_of(
    folder: Path,
    strategies: dict[str, Any],
    *,
    tied: bool = False,
    packing: bool = False,
    model: dict[str, Any] | None = None,
    **training: Any,
) -> Path:
    given = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    given |= {"learning_rate": 1e-3, **training}
    return write_config(
        folder,
        model={
            "config": {**MODEL, "tie_word_embeddings": tied},
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            **(model or {}),
        },
        data={"max_length": 32, "eval_fraction": 0.1, "packing": packing},
        training=given,
        strategies=strategies,
    )


def run(folder: Path, strategies: dict[str, Any], **how: Any) -> int:
    return main(["--config", str(config_of(folder, strategies, **how))])


def left(folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    steps = [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(folder / "run") if "grad_norm" in row]
    return steps, load_file(folder / "run" / "export" / "model.safetensors")


def test_offload_has_the_bits_of_plain_training(device: Any, tmp_path: Path) -> None:
    """With saved tensors on the host and a tied head, stopped after two steps and gone on with."""
    both = {"offload": OFFLOAD, "recompute": {"policy": "selective", "activation_offloading": True}}
    same: dict[str, Any] = {"tied": True, "lr_scheduler_type": "constant"}
    assert run(tmp_path / "plain", {}, **same) == 0
    before = device.counts()
    assert run(tmp_path / "parts", both, max_steps=2, **same) == 0
    after = device.counts()
    assert after["async_copies"] > before["async_copies"] and after["async_kernels"] - before["async_kernels"] > 500
    assert run(tmp_path / "parts", both, resume_from_checkpoint="auto", **same) == 0
    steps, weights = left(tmp_path / "plain")
    assert len(steps) == 4
    ours, our_weights = left(tmp_path / "parts")
    assert steps[2:] == ours[-2:]
    assert weights.keys() == our_weights.keys()
    assert all(torch.equal(value, our_weights[key]) for key, value in weights.items())


@pytest.mark.simulated("Accelerate knows CUDA, and torch has collectives for it")
def test_a_plan_for_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What plans and what trains must mean the same device."""
    monkeypatch.setattr("deepstow.trainer.run.building.name_device", lambda *_, **__: None)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    assert run(tmp_path, {"offload": OFFLOAD}) == ExitCode.CONFIG
    said = capsys.readouterr().err.splitlines()
    assert said == ["the plan is for sim, and Accelerate trains on cpu: training.use_cpu: true trains on the CPU"]


@pytest.mark.simulated("Accelerate knows CUDA, and torch has collectives for it")
def test_ranks_without_collectives_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"zero": {"stage": 2}}) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torch has no collectives for sim: train in one process without strategies.zero")


@pytest.mark.simulated("Accelerate knows CUDA, and torch has collectives for it")
def test_ranks_that_accelerate_does_not_know_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a kind that it does not know it finds one rank, where there are two."""
    monkeypatch.setattr("transformers.TrainingArguments.world_size", 2)
    assert run(tmp_path, {"offload": OFFLOAD}) == ExitCode.CONFIG
    assert capsys.readouterr().err == "Accelerate knows no ranks on sim: train in one process, or on the CPU\n"


def test_the_cpu_beside_an_accelerator(device: Any, tmp_path: Path) -> None:
    before = device.counts()
    assert run(tmp_path, {"offload": OFFLOAD}, use_cpu=True) == 0
    assert device.counts()["async_kernels"] == before["async_kernels"]
