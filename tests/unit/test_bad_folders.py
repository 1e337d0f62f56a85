"""Folders that are broken, or that somebody made to do harm: each is one line, before anything heavy, and a code.

Each goes through ``launch/train.py``; what is wrong with more than weights and templates also through the plan.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from deepstow.launch import plan, train
from deepstow.trainer.data import bounds
from deepstow.trainer.data import tokenizer as tokenizers
from tests.e2e.commands import write_jsonl

Change = Callable[[Path], object]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EMBEDDING = "model.embed_tokens.weight"
TEXTS = [f"row {number} of some words" for number in range(20)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one file and in several."""
    home = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model, words = transformers.LlamaForCausalLM(config), tokenizers.trained(300, home, TEXTS)
    for name, more in (("whole", {}), ("shards", {"max_shard_size": "30KB"})):
        model.save_pretrained(home / name, **more)
        words.save_pretrained(home / name)
    write_jsonl(home / "rows.jsonl", [{"text": text} for text in TEXTS])
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in TEXTS]
    write_jsonl(home / "chats.jsonl", [{"messages": each} for each in turns])
    return home


def refused(
    command: Any, base: Path, folder: Path, change: Change, capfd: Any, rows: str = "rows", **data: Any
) -> tuple[int, list[str]]:
    """The code and the lines on stderr for a copy of ``base`` that is changed."""
    shutil.copytree(base, folder / "model")
    change(folder / "model")
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


def text(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def keys(name: str, **changes: Any) -> Change:
    """A JSON file with other values at its top."""

    def change(folder: Path) -> None:
        tree = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(tree | changes))

    return change


def header(content: bytes) -> Change:
    return text(WEIGHTS, struct.pack("<Q", len(content)) + content)


def entry(name: str, **changes: Any) -> Change:
    """What the header says of a tensor."""

    def change(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        tree = json.loads(raw[8 : 8 + size])
        tree[name] |= changes
        made = json.dumps(tree).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(made)) + made + raw[8 + size :])

    return change


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def all_in(place: object) -> Change:
    """An index in which every tensor is at ``place``."""

    def change(folder: Path) -> None:
        tree = json.loads((folder / INDEX).read_text())
        keys(INDEX, weight_map=dict.fromkeys(tree["weight_map"], place))(folder)

    return change


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def special(name: str, kind: str) -> Change:
    """Something else in the place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(folder / name)
        elif kind == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(kind)

    return change


def pickled(name: str, content: object) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        torch.save(content, folder / name)

    return change


class Hostile:
    """Ends the process where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (99,)


SHARD = "model-00001-of-00005.safetensors"
OF_WEIGHTS: dict[str, tuple[str, Change, str]] = {
    "a pickle that runs code": ("whole", pickled("pytorch_model.bin", Hostile()), "its weights cannot be loaded: "),
    "pickled by Meta": ("whole", pickled("consolidated.00.pth", {}), "save_pretrained(NEW_FOLDER)"),
    "no weights": ("whole", gone(WEIGHTS), "holds no weights (model.safetensors)"),
    "zero bytes": ("whole", text(WEIGHTS, b""), "model.safetensors is damaged: header too small"),
    "a header of 4 EiB": ("whole", text(WEIGHTS, struct.pack("<Q", 2**62)), "header too large"),
    "a header that is no text": ("whole", header(b"\xff" * 99), "invalid UTF-8 in header"),
    "a header that is deep": ("whole", header(b'{"a":' * 9999), "invalid JSON in header"),
    "cut off": ("whole", cut(WEIGHTS, -100), "incomplete metadata"),
    "negative offsets": ("whole", entry(EMBEDDING, data_offsets=[-4, 8]), "invalid value: integer `-4`"),
    "overlapping": ("whole", entry(EMBEDDING, data_offsets=[0, 38400]), "invalid offset for tensor"),
    "an unknown type": ("whole", entry(EMBEDDING, dtype="X9"), "unknown variant `X9`"),
    "whole numbers": ("whole", entry(EMBEDDING, dtype="I32"), "has the type I32, and a weight has F64, F32, F16, BF16"),
    "a pipe": ("whole", special(WEIGHTS, "pipe"), "model.safetensors is a pipe, and no file"),
    "a device": ("whole", special(WEIGHTS, "/dev/zero"), "model.safetensors is a device, and no file"),
    "a shard is missing": ("shards", gone(SHARD), f"names {SHARD}, which is not there"),
    "a shard is cut off": ("shards", cut(SHARD, 30), f"{SHARD} is damaged"),
}
OF_FOLDERS: dict[str, tuple[str, Change, str]] = {
    "an index that leads out": ("shards", all_in(f"../whole/{WEIGHTS}"), "in the same folder"),
    "an index that leads to the root": ("shards", all_in(f"/tmp/{WEIGHTS}"), "in the same folder"),
    "an index of pickles": ("shards", all_in("pytorch_model.bin"), "must be the name of a .safetensors file"),
    "an index of numbers": ("shards", all_in(7), "weight_map.lm_head.weight = 7: must be the name"),
    "an index that is a list": ("shards", keys(INDEX, weight_map=[1]), "must have metadata, and a weight_map"),
    "garbage": ("whole", text(CONFIG, "{nope"), "config.json is no JSON: Expecting property name"),
    "a config that is a list": ("whole", text(CONFIG, "[1]"), "config.json must be a JSON object, not list"),
    "a config that is deep": ("whole", text(CONFIG, "[" * 99999), "config.json is no JSON: nested too deeply"),
    "a config of 17 MiB": ("whole", text(CONFIG, " " * (17 << 20)), "no configuration has over 16.0 MiB"),
    "a type of model that is a list": ("whole", keys(CONFIG, model_type=["a"]), "the folder holds no model"),
    "architectures that are no names": (
        "whole",
        keys(CONFIG, architectures=[5]),
        "architectures = [5]: must be a list",
    ),
    "a method that is a number": ("whole", keys(CONFIG, to_dict=5), "the folder holds no model"),
    "what no config that is saved may say": ("whole", keys(CONFIG, output_attentions=True), "could not be saved"),
    "no heads": ("whole", keys(CONFIG, num_attention_heads=0), "the folder holds no model"),
    "code of the hub": (
        "whole",
        keys(CONFIG, _attn_implementation="org/code"),
        "would load code from the Hugging Face hub",
    ),
    "code for a part": (
        "whole",
        keys(CONFIG, text_config={"attn_implementation": {"": "org/code:f"}}),
        "text_config.attn_implementation = 'org/code:f': would load code",
    ),
    "code of its own": (
        "whole",
        keys(CONFIG, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "brings its own Python code",
    ),
    "a billion layers": ("whole", keys(CONFIG, num_hidden_layers=10**9), "num_hidden_layers = 1000000000: must be"),
    "a billion layers of a part": (
        "whole",
        keys(CONFIG, model_type="gemma3", vision_config={"num_hidden_layers": 10**9}),
        "vision_config.num_hidden_layers = 1000000000: must be a whole number >= 1 and <= 2000",
    ),
    "a billion labels": ("whole", keys(CONFIG, num_labels=10**9), "num_labels = 1000000000: must be"),
    "a million experts": (
        "whole",
        keys(CONFIG, model_type="mixtral", num_hidden_layers=100, num_local_experts=10_000),
        "num_local_experts = 10000: 100 layers would have over 100000 experts",
    ),
    "a vocabulary of 10^12": ("whole", keys(CONFIG, vocab_size=10**12), "vocab_size = 1000000000000: must be"),
    "adapters": (
        "whole",
        text("adapter_config.json", '{"base_model_name_or_path": "org/name"}'),
        "it holds adapters (adapter_config.json); to go on with them write it as model.adapter",
    ),
    **{
        f"{name} of garbage": ("whole", text(name, b"\xff{"), f"{name} is no JSON")
        for name in ("generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json")
    },
    "a pipe for a config": ("whole", special(CONFIG, "pipe"), "config.json is a pipe, and no file"),
    "a folder for a config": ("whole", special(CONFIG, "folder"), "config.json is a folder, and no file"),
    "a loop of links": ("whole", special(CONFIG, CONFIG), "config.json cannot be read: Too many levels"),
    "a link to nowhere": ("whole", special("tokenizer.json", "nowhere"), "tokenizer.json cannot be read: No such file"),
    "a device for a template": ("whole", special("chat_template.jinja", "/dev/zero"), "is a device, and no file"),
}


@pytest.mark.parametrize(("base", "change", "words"), OF_WEIGHTS.values(), ids=OF_WEIGHTS)
def test_weights(base: str, change: Change, words: str, models: Path, tmp_path: Path, capfd: Any) -> None:
    code, lines = refused(train, models / base, tmp_path, change, capfd)
    assert code == 2 and len(lines) == 1 and words in lines[0], lines
    assert lines[0].startswith(f"{tmp_path}/config.yaml:")


@pytest.mark.parametrize("command", [train, plan], ids=["train", "plan"])
@pytest.mark.parametrize(("base", "change", "words"), OF_FOLDERS.values(), ids=OF_FOLDERS)
def test_folders(command: Any, base: str, change: Change, words: str, models: Path, tmp_path: Path, capfd: Any) -> None:
    code, lines = refused(command, models / base, tmp_path, change, capfd)
    assert code == 2 and len(lines) == 1 and words in lines[0], lines
    assert lines[0].startswith(f"{tmp_path}/config.yaml:")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROWS = "{% set a = namespace(x='a') %}{% for b in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}{{ a.x }}"
TEMPLATES = {
    "loops in loops": (LOOPS, "the tokenizer's chat template: one conversation takes over 0.2 s to render"),
    "twice as many calls each time": (TWICE, "takes over 0.2 s to render"),
    "twice as much each time": (GROWS, "takes over 1 GiB to render"),
    "much at once": ("{{ 'a' * 99999999999 }}", "takes over 1 GiB to render"),
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
    change = text("chat_template.jinja", template)
    code, lines = refused(train, models / "whole", tmp_path, change, capfd, "chats")
    assert code == 3 and len(lines) == 1 and words in lines[0], lines


def test_templates_of_a_config_and_of_preferences(
    models: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    code, lines = refused(train, models / "whole", tmp_path, str, capfd, "chats", chat_template=LOOPS)
    assert code == 3 and len(lines) == 1 and "data.chat_template: one conversation takes over" in lines[0]
