"""Names of other frameworks, and our own in the wrong place, are answered with where they belong."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config.hints import FOREIGN, known_keys
from trainer.config.load import load
from trainer.config.sections import RunConfig
from trainer.errors import ConfigError

SHIFT = "that follows from per_device_train_batch_size, gradient_accumulation_steps and the number of devices"
LAUNCHER = "the launcher decides that: deepspeed --num_gpus=N launch/train.py"

# key, as written in the file; value; what the line says after "unknown key; "
CASES: tuple[tuple[str, object, str], ...] = (
    ("base_model", "m", "that is Axolotl's name, write 'model.name_or_path'"),
    ("micro_batch_size", 4, "that is Axolotl's name, write 'training.per_device_train_batch_size'"),
    ("sequence_len", 512, "that is Axolotl's name, write 'data.max_length'"),
    ("sample_packing", True, "that is Axolotl's name, write 'data.packing'"),
    ("num_epochs", 3, "that is Axolotl's name, write 'training.num_train_epochs'"),
    ("val_set_size", 0.1, "that is Axolotl's name, write 'data.eval_fraction'"),
    (
        "train_on_inputs",
        False,
        "that is Axolotl's name, write 'data.completion_only_loss' (with the opposite meaning)",
    ),
    ("lora_r", 8, "that is Axolotl's name, write 'model.lora.r'"),
    ("cutoff_len", 512, "that is LLaMA-Factory's name, write 'data.max_length'"),
    ("val_size", 0.1, "that is LLaMA-Factory's name, write 'data.eval_fraction'"),
    ("flash_attn", "fa2", "that is LLaMA-Factory's name, write 'model.attn_implementation'"),
    ("lora_rank", 8, "that is LLaMA-Factory's name, write 'model.lora.r'"),
    ("model_name_or_path", "m", "that is TRL's name, write 'model.name_or_path'"),
    ("dataset_name", "d", "that is TRL's name, write 'data.path'"),
    (
        "training.warmup_ratio",
        0.1,
        "that is older Hugging Face's name, write 'training.warmup_steps' (a value below 1 is a share of all steps)",
    ),
    ("training.evaluation_strategy", "no", "that is older Hugging Face's name, write 'training.eval_strategy'"),
    ("model.torch_dtype", "auto", "that is older Hugging Face's name, write 'model.dtype'"),
    ("batch_size", 2, "that is torchtune's name, write 'training.per_device_train_batch_size'"),
    ("clip_grad_norm", 1.0, "that is torchtune's name, write 'training.max_grad_norm'"),
    ("tokenizer.max_seq_len", 512, "that is torchtune's name, write 'data.max_length'"),
    ("checkpointer.checkpoint_dir", "m", "that is torchtune's name, write 'model.name_or_path'"),
    ("train.micro_batch_size", 1, "that is litgpt's name, write 'training.per_device_train_batch_size'"),
    ("train.global_batch_size", 64, f"that is litgpt's name; {SHIFT}"),
    ("data.mask_prompt", True, "that is litgpt's name, write 'data.completion_only_loss'"),
    ("training.steps", 10, "that is torchtitan's name, write 'training.max_steps'"),
    ("training.local_batch_size", 1, "that is torchtitan's name, write 'training.per_device_train_batch_size'"),
    ("optimizer.lr", 1.0, "that is torchtitan's name, write 'training.learning_rate'"),
    (
        "train_micro_batch_size_per_gpu",
        4,
        "that is DeepSpeed's name, write 'training.per_device_train_batch_size'",
    ),
    ("gradient_clipping", 1.0, "that is DeepSpeed's name, write 'training.max_grad_norm'"),
    ("zero_optimization.stage", 3, "that is DeepSpeed's name, write 'strategies.zero.stage'"),
    ("zero_optimization", None, "that is DeepSpeed's name, write 'strategies.zero'"),
    (
        "zero_optimization.offload_param.device",
        "cpu",
        "that is DeepSpeed's name, write 'strategies.offload'",
    ),
    ("bf16.enabled", True, "that is DeepSpeed's name, write 'training.bf16'"),
    ("fp16.enabled", "auto", "that is DeepSpeed's name, write 'training.fp16'"),
    ("optimizer.params.lr", 1.0, "that is DeepSpeed's name, write 'training.learning_rate'"),
    ("scheduler.params.warmup_num_steps", 5, "that is DeepSpeed's name, write 'training.warmup_steps'"),
    ("accumulate_grad_batches", 4, "that is Lightning's name, write 'training.gradient_accumulation_steps'"),
    ("gradient_clip_val", 1.0, "that is Lightning's name, write 'training.max_grad_norm'"),
    ("precision", "bf16-mixed", "that is Lightning's name, write 'training.bf16' (or training.fp16)"),
    ("devices", 2, f"that is Lightning's name; {LAUNCHER}"),
    ("training.lr", 1.0, "that is PyTorch's name, write 'training.learning_rate'"),
    # Our own names, in the wrong place.
    ("learning_rate", 1.0, "write 'training.learning_rate'"),
    ("training.max_length", 512, "write 'data.max_length'"),
    ("training.zero", {}, "write 'strategies.zero'"),
    ("model.lora_dropout", 0.1, "write 'model.lora.lora_dropout'"),
    ("data.dtype", "float32", "write 'model.dtype'"),
    ("fsdp", "full_shard", "DeepSpeed is the only engine here; write the section strategies"),
)


def nested(key: str, value: object) -> dict[str, Any]:
    """A good config with ``key`` in it."""
    tree: dict[str, Any] = {
        "model": {"name_or_path": "m"},
        "data": {"path": "pydoc"},
        "training": {"output_dir": "r"},
    }
    *sections, name = key.split(".")
    at = tree
    for section in sections:
        at = at.setdefault(section, {})
    at[name] = value
    return tree


def complaints(path: Path, key: str, value: object) -> list[str]:
    path.write_text(yaml.safe_dump(nested(key, value)))
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [line.removeprefix(f"{path}:").split(": ", 1)[1] for line in caught.value.lines]


@pytest.mark.parametrize(("key", "value", "expected"), CASES)
def test_exact_line(key: str, value: object, expected: str, tmp_path: Path) -> None:
    assert complaints(tmp_path / "x.yaml", key, value) == [f"{key} = {json.dumps(value)}: unknown key; {expected}"]


ENTRIES = [(whose, key, ours) for whose, table in FOREIGN.items() for key, ours in table.items()]


def test_there_are_enough() -> None:
    assert len(CASES) >= 40
    assert len(ENTRIES) >= 100


def test_no_name_is_claimed_twice_or_ours() -> None:
    assert [key for key, count in Counter(key for _, key, _ in ENTRIES).items() if count > 1] == []
    ours = {key.rpartition(".")[2] for key in known_keys()} | set(known_keys())
    assert sorted({key for _, key, _ in ENTRIES} & ours) == []


def test_every_answer_is_a_key_of_ours(tmp_path: Path) -> None:
    # What options strategies have is known to their files only.
    options = {"strategies.zero.stage", "strategies.recompute.activation_offloading"}
    known = {*known_keys(), *options}
    for whose, key, ours in ENTRIES:
        answer = ours.partition("; ")[0]
        assert answer in known or answer.split(".")[0] not in RunConfig.model_fields, key
        assert any(f"that is {whose}'s name" in line for line in complaints(tmp_path / "x.yaml", key, "x")), key
