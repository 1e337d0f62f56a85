"""Every bad config gets its exact lines: file, line, dotted key, value, what is allowed, the nearest key."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.trainer.config.check import elsewhere, known_keys
from deepstow.trainer.config.load import load
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.errors import ConfigError, ExitCode

GOOD = {"model": "model: {name_or_path: m}", "data": "data: {path: pydoc}", "training": "training: {output_dir: r}"}
SECTIONS = "a config has the sections model, data, training, strategies"
MISSING = (
    "1: model.name_or_path: missing; write a folder or hub name, or model.config for random weights",
    "1: data.path: missing; write a file, a folder, a hub name or pydoc, or data.datasets for several",
    "1: training.output_dir: missing; must be non-empty text",
)

IMPORT = "deepstow import makes a config from it"
SEED = "must be a whole number >= 0 and < 4294967296"
KEY_VALUE = "an override is written key=value, as in training.max_steps=10"
BASE = "must be the path of one config, relative to this file"
ONE_LEVEL = "a base extends nothing; one level only"

# Whole files: what YAML itself can do wrong.
FILES: tuple[tuple[bytes, tuple[str, ...]], ...] = (
    (b"", (f"1: the file is empty; {SECTIONS}",)),
    (b"\xef\xbb\xbf", (f"1: the file is empty; {SECTIONS}",)),
    (b"- a\n- b\n", (f'1: ["a", "b"] stands alone; {SECTIONS}',)),
    (b"{}", MISSING),
    (
        b"base_model: m\nlr: 1",
        (
            f"1: none of the sections model, data, training is here; is the file another framework's? {IMPORT}",
            "1: base_model = \"m\": unknown key; that is Axolotl's name, write 'model.name_or_path'",
            "2: lr = 1: unknown key; that is PyTorch's name, write 'training.learning_rate'",
        ),
    ),
    (b"training:\n\toutput_dir: r\n", ("2: a tab in the indentation; use spaces",)),
    (b"data:\n  path: \xff\n", ("2: not UTF-8; save the file as UTF-8",)),
    (b"data: {path: \x01}\n", ("1: a control character; delete it",)),
    (b"data: &d {path: x}\nmodel: *d\n", ("2: aliases (*name) are not read; write the value where it is used",)),
    (b"data: {path: x\n", ("2: a bracket is never closed, or a comma is missing",)),
    (b"data: {path: 'x\n", ("2: a quote or bracket is never closed",)),
    (b"data: a: b\n", ("1: a ':' where none can be; check the indentation, or quote the text",)),
    (b"a: 1\n---\nb: 2\n", ("2: more than one document; a config is one",)),
    (b"data:\n  path: x\n max_length: 9\n", ("3: the indentation does not match the lines above",)),
    (b"data: {path: @x}\n", ("1: text that begins with a special character; put it in quotes",)),
    (b"[" * 5000, ("1: nested too deeply",)),
)

OVERRIDES: tuple[tuple[str, str], ...] = (
    ("training.max_steps", f"training.max_steps: {KEY_VALUE}"),
    ("=3", f"=3: {KEY_VALUE}"),
    ("training..seed=3", f"training..seed=3: {KEY_VALUE}"),
    ("--training.seed=3", "--training.seed=3: write training.seed=3, without dashes"),
    ("training.seed=x", f'training.seed = "x": {SEED}'),
    ("training.seed=1_000", f'training.seed = "1_000": {SEED}; write it plainly, without quotes or underscores'),
    ("training.seed=[1", 'training.seed = "[1": a bracket is never closed, or a comma is missing'),
    ("lr=1e-4", "lr = 0.0001: unknown key; that is PyTorch's name, write 'training.learning_rate'"),
    ("extends=base.yaml", 'extends = "base.yaml": belongs into the file'),
    ("training.output_dir=null", "training.output_dir: missing; must be non-empty text"),
    ("training=null", "training.output_dir: missing; must be non-empty text"),
    ("data.path.x=1", 'data.path = {"x": 1}: must be non-empty text'),
)


def blocks() -> Iterator[tuple[str, list[str]]]:
    text = (Path(__file__).parent / "bad_configs.txt").read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        lines = [line for line in block.strip().splitlines() if not line.startswith("# ")]
        if lines:
            config = [line for line in lines if not line.startswith("=> ")]
            yield "\n".join(config), [line.removeprefix("=> ") for line in lines if line.startswith("=> ")]


def complete(text: str) -> str:
    present = {line.split(":")[0] for line in text.splitlines()}
    return "\n".join([text, *(line for name, line in GOOD.items() if name not in present)])


def lines(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load("x.yaml", overrides)
    assert caught.value.code is ExitCode.CONFIG
    return list(caught.value.lines)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("text", "expected"), blocks())
def test_sections(text: str, expected: list[str]) -> None:
    Path("x.yaml").write_text(complete(text), encoding="utf-8")
    assert lines() == [f"x.yaml:{line}" for line in expected]


@pytest.mark.parametrize(("content", "expected"), FILES)
def test_files(content: bytes, expected: tuple[str, ...]) -> None:
    Path("x.yaml").write_bytes(content)
    assert sorted(lines()) == sorted(f"x.yaml:{line}" for line in expected)


@pytest.mark.parametrize(("override", "expected"), OVERRIDES)
def test_overrides(override: str, expected: str) -> None:
    Path("x.yaml").write_text(complete(""), encoding="utf-8")
    assert lines(override) == [f"command line: {expected}"]


def test_all_errors_of_all_layers_at_once_in_order() -> None:
    Path("base.yaml").write_text("model: {name_or_path: m, dtype: fp8}\ntraining:\n  output_dir: r\n  seed: -1\n")
    Path("x.yaml").write_text("training:\n  lerning_rate: 1\n\nextends: base.yaml\ndata:\n  packing: yes\n")
    assert lines("training.max_steps=0") == [
        "x.yaml:2: training.lerning_rate = 1: unknown key; did you mean 'learning_rate'?",
        "x.yaml:5: data.path: missing; write a file, a folder, a hub name or pydoc, or data.datasets for several",
        'x.yaml:6: data.packing = "yes": must be true or false',
        'base.yaml:1: model.dtype = "fp8": must be one of float32, bfloat16, float16',
        f"base.yaml:4: training.seed = -1: {SEED}",
        "command line: training.max_steps = 0: must be a whole number >= 1, or -1 for no limit",
    ]


def test_conflicts_are_found_beside_other_errors_and_never_twice() -> None:
    training = "training: {output_dir: r, bf16: true, fp16: true, seed: -1, max_steps: no}\n"
    Path("x.yaml").write_text(complete(training + "data: {path: x, streaming: true}"))
    assert lines() == [
        f"x.yaml:1: training.seed = -1: {SEED}",
        'x.yaml:1: training.max_steps = "no": must be a whole number >= 1, or -1 for no limit',
        "x.yaml:1: training.fp16 = true: cannot go with training.bf16; keep one of the two",
    ]


# What x.yaml extends, what is in b.yaml, and the line.
EXTENDS: tuple[tuple[str, str, str], ...] = (
    ("3", "", f"x.yaml:1: extends = 3: {BASE}"),
    ("bb.yaml", "", "x.yaml:1: extends = \"bb.yaml\": no such file; did you mean 'b.yaml'?"),
    (".", "", 'x.yaml:1: extends = ".": cannot be read: Is a directory'),
    ("b.yaml", "extends: c.yaml", f'b.yaml:1: extends = "c.yaml": {ONE_LEVEL}; write extends: c.yaml in x.yaml, and '
     "what else it needs"),
    ('"a\\0b"', "", 'x.yaml:1: extends = "a\\u0000b": cannot be read: not a path'),
    ("b.yaml", "training: {seed: x}", f'b.yaml:1: training.seed = "x": {SEED}'),
    ("x.yaml", "", f'x.yaml:1: extends = "x.yaml": {ONE_LEVEL}'),
    ("b.yaml", "a: [", "b.yaml:1: a value is missing, or a bracket is never closed"),
)  # fmt: skip


@pytest.mark.parametrize(("base", "content", "expected"), EXTENDS)
def test_extends(base: str, content: str, expected: str) -> None:
    Path("b.yaml").write_text(content)
    Path("x.yaml").write_text(complete(f"extends: {base}"))
    assert lines() == [expected]


def test_what_a_base_of_a_base_has_is_not_missing() -> None:
    Path("b.yaml").write_text("extends: c.yaml\ntraining: {eval_strategy: steps, eval_steps: 2}\n")
    Path("x.yaml").write_text("extends: b.yaml\n")
    assert [line.partition(": a base")[0] for line in lines()] == ['b.yaml:1: extends = "c.yaml"']


def test_missing_file_names_the_nearest() -> None:
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text(complete(""))
    with pytest.raises(ConfigError) as caught:
        load("configs/quikstart.yaml")
    assert caught.value.lines == ("configs/quikstart.yaml: no such file; did you mean 'configs/quickstart.yaml'?",)
    with pytest.raises(ConfigError) as caught:
        load("nowhere/x.yaml")
    assert caught.value.lines == ("nowhere/x.yaml: no such file",)
    with pytest.raises(ConfigError) as caught:
        load("configs")
    assert caught.value.lines == ("configs: cannot be read: Is a directory",)


# --- names of other frameworks, and our own in the wrong place ---

# A line of each kind, word for word: renamed, with a remark, explained, a section, ours in the wrong place, refused.
FOREIGN = """
micro_batch_size = 4: unknown key; that is Axolotl's name, write 'training.per_device_train_batch_size'
train_on_inputs = false: unknown key; that is Axolotl's name, write 'data.completion_only_loss' (with the opposite meaning)
precision = "bf16": unknown key; that is Lightning's name, write 'training.bf16' (or training.fp16)
devices = 2: unknown key; that is Lightning's name; the launcher decides that: deepstow train --ranks N
zero_optimization.stage = 3: unknown key; that is DeepSpeed's name, write 'strategies.zero.stage'
training.lr = 1.0: unknown key; that is PyTorch's name, write 'training.learning_rate'
training.max_length = 512: unknown key; write 'data.max_length'
fsdp = "full_shard": unknown key; that is Hugging Face's name; DeepSpeed is the engine here; write the section strategies
"""  # noqa: E501
BEYOND = {
    "strategies.zero.stage", "strategies.recompute", "strategies.recompute.activation_offloading",
    "strategies.sequence.degree", "strategies.tensor.degree",
}  # fmt: skip


def test_every_foreign_key_is_answered() -> None:
    entries = [(whose, key, ours) for key, (whose, ours) in elsewhere().items()]
    mine = {key.rpartition(".")[2] for key in known_keys()} | set(known_keys())
    assert len(entries) >= 100
    assert [key for key, count in Counter(key for _, key, _ in entries).items() if count > 1 or key in mine] == []
    exact = [(*tuple(line.split(": ", 1)[0].split(" = ")), line) for line in FOREIGN.strip().splitlines()]
    found = [(key, "x", f"that is {whose}'s name") for whose, key, _ in entries]
    for key, value, expected in [(key, yaml.safe_load(value), line) for key, value, line in exact] + found:
        tree: dict[str, Any] = yaml.safe_load("\n".join(GOOD.values()))
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
        Path("x.yaml").write_text(yaml.safe_dump(tree))
        assert any(expected in line for line in lines()), key
    answers = {ours.partition("; ")[0] for _, _, ours in entries}
    own = {answer for answer in answers if answer.split(".")[0] in RunConfig.model_fields}
    assert own <= {*known_keys(), *BEYOND}
