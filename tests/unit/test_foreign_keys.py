"""Names of other frameworks, and our own in the wrong place, are answered with where they belong."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from trainer.config.check import elsewhere, known_keys
from trainer.config.load import load
from trainer.config.sections import RunConfig
from trainer.errors import ConfigError

# A line of each kind, word for word: renamed, with a remark, explained, a section, ours in the wrong place, refused.
LINES = """
micro_batch_size = 4: unknown key; that is Axolotl's name, write 'training.per_device_train_batch_size'
train_on_inputs = false: unknown key; that is Axolotl's name, write 'data.completion_only_loss' (with the opposite meaning)
precision = "bf16": unknown key; that is Lightning's name, write 'training.bf16' (or training.fp16)
devices = 2: unknown key; that is Lightning's name; the launcher decides that: deepspeed --num_gpus=N launch/train.py
zero_optimization.stage = 3: unknown key; that is DeepSpeed's name, write 'strategies.zero.stage'
training.lr = 1.0: unknown key; that is PyTorch's name, write 'training.learning_rate'
training.max_length = 512: unknown key; write 'data.max_length'
fsdp = "full_shard": unknown key; that is Hugging Face's name; DeepSpeed is the engine here; write the section strategies
"""  # noqa: E501
BEYOND = {"strategies.zero.stage", "strategies.recompute", "strategies.recompute.activation_offloading"}


def test_every_foreign_key_is_answered(tmp_path: Path) -> None:
    entries = [(whose, key, ours) for key, (whose, ours) in elsewhere().items()]
    mine = {key.rpartition(".")[2] for key in known_keys()} | set(known_keys())
    assert len(entries) >= 100
    assert [key for key, count in Counter(key for _, key, _ in entries).items() if count > 1 or key in mine] == []
    exact = [(*tuple(line.split(": ", 1)[0].split(" = ")), line) for line in LINES.strip().splitlines()]
    found = [(key, "x", f"that is {whose}'s name") for whose, key, _ in entries]
    for key, value, expected in [(key, yaml.safe_load(value), line) for key, value, line in exact] + found:
        lines = {"model": {"name_or_path": "m"}, "data": {"path": "pydoc"}, "training": {"output_dir": "r"}}
        *sections, name = key.split(".")
        at: dict[str, object] = lines  # type: ignore[assignment]
        for section in sections:
            at = at.setdefault(section, {})  # type: ignore[assignment]
        at[name] = value
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(lines))
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "x.yaml")
        assert any(expected in line for line in caught.value.lines), (key, caught.value.lines)
    answers = {ours.partition("; ")[0] for _, _, ours in entries}
    own = {answer for answer in answers if answer.split(".")[0] in RunConfig.model_fields}
    assert own <= {*known_keys(), *BEYOND}
