"""Folders that are broken, or that somebody made to do harm: each is one line, before anything heavy, and a code.

Each goes through ``launch/train.py``, and some through the plan.
"""

import io
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save

from deepstow.launch import plan, train
from deepstow.trainer.data import bounds
from deepstow.trainer.data import tokenizer as tokenizers
from tests.e2e.commands import write_jsonl

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TEXTS = [f"row {number} of some words" for number in range(20)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one file, in several, and without weights."""
    home = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model, words = transformers.LlamaForCausalLM(config), tokenizers.trained(300, home, TEXTS)
    for name, more in (("whole", {}), ("shards", {"max_shard_size": "30KB"}), ("bare", {})):
        model.save_pretrained(home / name, **more)
        words.save_pretrained(home / name)
    (home / "bare" / WEIGHTS).unlink()
    write_jsonl(home / "rows.jsonl", [{"text": text} for text in TEXTS])
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in TEXTS]
    write_jsonl(home / "chats.jsonl", [{"messages": each} for each in turns])
    return home


def changed(path: Path, new: Any) -> None:
    """Other values at the top of a JSON file; other content; so many bytes cut off; a pipe, folder or link; nothing."""
    if isinstance(new, dict):
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | new))
    elif isinstance(new, bytes):
        path.write_bytes(new)
    elif isinstance(new, int):
        path.write_bytes(path.read_bytes()[:-new])
    else:
        path.unlink(missing_ok=True)
        if new == "pipe":
            os.mkfifo(path)
        elif new == "folder":
            path.mkdir()
        elif new:
            path.symlink_to(new)


def refused(
    command: Any, base: Path, folder: Path, file: str, new: Any, capfd: Any, rows: str = "rows", **data: Any
) -> tuple[int, list[str]]:
    """The code and the lines on stderr for a copy of ``base`` of which one file is changed."""
    shutil.copytree(base, folder / "model")
    changed(folder / "model" / file, new)
    training = {"output_dir": str(folder / "run"), "max_steps": 1, "learning_rate": 1e-3, "use_cpu": True}
    tree = {
        "model": {"name_or_path": str(folder / "model")},
        "data": {"path": str(base.parent / f"{rows}.jsonl"), "max_length": 32, **data},
        "training": training | {"report_to": "none", "save_strategy": "no"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    capfd.readouterr()
    code = command.main(["--config", str(folder / "config.yaml")])
    said = capfd.readouterr()
    assert not (folder / "run" / "plan.json").exists(), "it is refused before the run's folder is written"
    return code, [line for line in said.err.splitlines() if line.strip()]


class Hostile:
    """Ends the process where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (99,)


def pickled(content: object) -> bytes:
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


DEEP = b'{"a":' * 9999
NUMBERS = save({"model.embed_tokens.weight": torch.zeros(300, 32, dtype=torch.int32)})
SHARD = "model-00001-of-00005.safetensors"
OUT = {"weight_map": {"lm_head.weight": f"../whole/{WEIGHTS}"}}
ROOT = {"weight_map": {"lm_head.weight": f"/tmp/{WEIGHTS}"}}
PICKLES = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
CODE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
OF_PART = {"text_config": {"attn_implementation": {"": "org/code:f"}}}
LAYERS = {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 10**9}}
EXPERTS = {"model_type": "mixtral", "num_hidden_layers": 100, "num_local_experts": 10_000}
# A model, a file of it, what becomes of that, and a part of the line.
CASES: list[tuple[str, str, Any, str]] = [
    ("bare", "pytorch_model.bin", pickled(Hostile()), "its weights cannot be loaded: "),
    ("bare", "consolidated.00.pth", pickled({}), "save_pretrained(NEW_FOLDER)"),
    ("bare", WEIGHTS, None, "holds no weights (model.safetensors)"),
    ("whole", WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP, "invalid JSON in header"),
    ("whole", WEIGHTS, 100, "incomplete metadata"),
    ("whole", WEIGHTS, NUMBERS, "has the type I32, and a weight has F64, F32, F16, BF16"),
    ("whole", WEIGHTS, "pipe", "model.safetensors is a pipe, and no file"),
    ("shards", SHARD, None, f"names {SHARD}, which is not there"),
    ("shards", SHARD, 100, f"{SHARD} is damaged"),
    ("shards", INDEX, OUT, "in the same folder"),
    ("shards", INDEX, ROOT, "in the same folder"),
    ("shards", INDEX, {"weight_map": {"lm_head.weight": 7}}, "weight_map.lm_head.weight = 7: must be the name"),
    ("shards", INDEX, PICKLES, "must be the name of a .safetensors file"),
    ("shards", INDEX, {"weight_map": [1]}, "must have metadata, and a weight_map"),
    ("whole", CONFIG, b"{nope", "config.json is no JSON: Expecting property name"),
    ("whole", CONFIG, b"[1]", "config.json must be a JSON object, not list"),
    ("whole", CONFIG, b"[" * 99999, "config.json is no JSON: nested too deeply"),
    ("whole", CONFIG, b" " * (17 << 20), "no configuration has over 16.0 MiB"),
    ("whole", CONFIG, {"model_type": ["a"]}, "the folder holds no model"),
    ("whole", CONFIG, {"architectures": [5]}, "architectures = [5]: must be a list"),
    ("whole", CONFIG, {"output_attentions": True}, "could not be saved"),
    ("whole", CONFIG, {"num_attention_heads": 0}, "the folder holds no model"),
    ("whole", CONFIG, {"_attn_implementation": "org/code"}, "would load code from the Hugging Face hub"),
    ("whole", CONFIG, OF_PART, "text_config.attn_implementation = 'org/code:f': would load code"),
    ("whole", CONFIG, CODE, "brings its own Python code"),
    ("whole", CONFIG, LAYERS, "vision_config.num_hidden_layers = 1000000000: must be a whole number >= 1 and <= 2000"),
    ("whole", CONFIG, {"num_labels": 10**9}, "num_labels = 1000000000: must be"),
    ("whole", CONFIG, {"vocab_size": 10**12}, "vocab_size = 1000000000000: must be"),
    ("whole", CONFIG, EXPERTS, "num_local_experts = 10000: 100 layers would have over 100000 experts"),
    (
        "whole",
        "adapter_config.json",
        {"base_model_name_or_path": "a/b"},
        "it holds adapters (adapter_config.json); to ",
    ),
    ("whole", "adapter_config.json", b"\xff{", "adapter_config.json is no JSON"),
    ("whole", "generation_config.json", b"\xff{", "generation_config.json is no JSON"),
    ("whole", "tokenizer.json", b"\xff{", "tokenizer.json is no JSON"),
    ("whole", "tokenizer_config.json", b"\xff{", "tokenizer_config.json is no JSON"),
    ("whole", CONFIG, "folder", "config.json is a folder, and no file"),
    ("whole", CONFIG, "pipe", "config.json is a pipe, and no file"),
    ("whole", CONFIG, CONFIG, "config.json cannot be read: Too many levels"),
    ("whole", "tokenizer.json", "nowhere", "tokenizer.json cannot be read: No such file"),
    ("whole", "chat_template.jinja", "/dev/zero", "is a device, and no file"),
]
PLANNED = [case for case in CASES if case[2] in (b"{nope", PICKLES, CODE)]


@pytest.mark.parametrize(("command", "case"), [*((train, case) for case in CASES), *((plan, case) for case in PLANNED)])
def test_folders(command: Any, case: tuple[str, str, Any, str], models: Path, tmp_path: Path, capfd: Any) -> None:
    base, file, new, words = case
    code, lines = refused(command, models / base, tmp_path, file, new, capfd)
    assert code == 2 and len(lines) == 1 and words in lines[0], lines
    assert lines[0].startswith(f"{tmp_path}/config.yaml:")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set a = namespace(x='a') %}{% for b in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}{{ a.x }}"
TEMPLATES = {
    "loops in loops": (LOOPS, "the tokenizer's chat template: one conversation takes over 0.2 s to render"),
    "twice as much each time": (GROWS, "takes over 1 GiB to render"),
    "a power": ("\n{{ 10 ** messages[0].content | length }}", "template:2: computes a power (**)"),
    "characters": ("{{ 1 }}" * 200_000, "has 1,400,000 characters, and no template has over 1,048,576"),
    "no end of calls": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it: maximum recursion depth"),
}


@pytest.mark.parametrize(("template", "words"), TEMPLATES.values(), ids=TEMPLATES)
def test_templates(
    template: str, words: str, models: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time is the bound of those whose words name it; the others must reach theirs however slow the machine is.
    monkeypatch.setattr(bounds, "SECONDS", 0.2 if "0.2 s" in words else 60.0)
    file, new = "chat_template.jinja", template.encode()
    code, lines = refused(train, models / "whole", tmp_path, file, new, capfd, "chats")
    assert code == 3 and len(lines) == 1 and words in lines[0], lines


def test_templates_of_a_config_and_of_preferences(
    models: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    given = (models / "whole", tmp_path, "other.json", b"", capfd, "chats")
    code, lines = refused(train, *given, chat_template=LOOPS)
    assert code == 3 and len(lines) == 1 and "data.chat_template: one conversation takes over" in lines[0]
