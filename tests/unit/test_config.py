"""Loading: what a good config becomes, where its values come from, and that nothing ever escapes as a traceback."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deepstow.strategies.core import optimizers
from deepstow.strategies.core.optimizers import OPTIMIZERS, refuse_optimizer
from deepstow.trainer.config.arguments import OWN, RENAMED, TrainingSection
from deepstow.trainer.config.check import choices, elsewhere, known_keys
from deepstow.trainer.config.doc import pages
from deepstow.trainer.config.load import load
from deepstow.trainer.config.sections import DataSection, ModelSection, RunConfig
from deepstow.trainer.config.yaml_file import parse
from deepstow.trainer.errors import ConfigError, DataError
from deepstow.trainer.tasks.task import TASKS

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = """
model:      {name_or_path: m}
data:       {path: pydoc, max_length: 512, packing: true}
training:   {output_dir: runs/quickstart, learning_rate: 1e-3, per_device_train_batch_size: 8, max_steps: 200}
strategies: {zero: {stage: 2}}
"""
FUZZ = settings(
    max_examples=30, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(QUICKSTART)
    return path


def test_quickstart(file: Path) -> None:
    config = load(file)
    assert config.model == ModelSection(name_or_path="m")
    assert config.data == DataSection(path="pydoc", max_length=512, packing=True)
    assert (config.training.learning_rate, config.training.max_steps) == (1e-3, 200)
    assert config.strategies["zero"].model_dump() == {"stage": 2}
    assert config.training.arguments() == {
        "output_dir": "runs/quickstart", "learning_rate": 1e-3, "per_device_train_batch_size": 8, "max_steps": 200,
        "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused",
        "seed": 42, "bf16": False, "fp16": False, "logging_steps": 10, "report_to": ["tensorboard"],
        "eval_strategy": "no", "save_strategy": "steps", "save_steps": 500,
    }  # fmt: skip


def test_every_name_of_training_arguments_is_a_field_or_refused() -> None:
    """Read from the installed source, so that torch need not be imported."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    tree = ast.parse((Path(found.origin).parent / "training_args.py").read_text())
    (theirs,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    names = {
        node.target.id for node in theirs.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    ours = set(TrainingSection.model_fields)
    refused = {name for name, (whose, _) in elsewhere().items() if whose == "Hugging Face"}
    assert ours & refused == set()
    assert names - ours - refused == set(), "new names: give each a field or a reason"
    of_tasks = {key.removeprefix("training.") for task in TASKS.values() for key in task.keys}
    assert (ours | refused) - names - OWN - of_tasks <= set(RENAMED), "names that TrainingArguments does not have"


def test_every_optimizer_of_hugging_face_is_had_or_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {each.value for each in transformers.training_args.OptimizerNames}
    for name in theirs - OPTIMIZERS.keys():  # a new one: write what it is, or why not
        with pytest.raises(ValueError, match="write lion_32bit" if "lion" in name else "write adamw_torch_fused"):
            refuse_optimizer(name)
    assert [refuse_optimizer(name) for name in OPTIMIZERS] == list(OPTIMIZERS)
    assert choices(TrainingSection.model_fields["optim"].annotation) == tuple(OPTIMIZERS)


def test_an_optimizer_of_a_package_that_is_not_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        load(file, ["training.optim=lion_32bit"])
    (line,) = refused.value.lines
    what = "needs the package bitsandbytes; install it with: pip install 'deepstow[qlora]'"
    assert line == f'command line: training.optim = "lion_32bit": {what}'


def test_hugging_face_accepts_what_we_hand_over(tmp_path: Path) -> None:
    """By names that every release knows, and without what is an argument of ``Trainer.train``."""
    transformers = pytest.importorskip("transformers")
    ours = {"use_cpu": True, "warmup_steps": 0.1, "report_to": "none", "activation_checkpointing": True, "project": "p"}
    given = TrainingSection(output_dir=str(tmp_path), resume_from_checkpoint="auto", **ours).arguments()
    assert "activation_checkpointing" not in given
    theirs = transformers.TrainingArguments(**given)
    assert theirs.warmup_steps == 0.1 and theirs.report_to == [] and theirs.gradient_checkpointing
    assert theirs.resume_from_checkpoint is None and theirs.project == "p"  # Trackio's callback reads it there
    for metric, greater in (
        ("perplexity", False),
        ("mae", False),
        ("eval_loss", False),
        ("accuracy", True),
        (None, False),
    ):
        early = TrainingSection(output_dir="r", early_stopping_patience=2, metric_for_best_model=metric, eval_steps=1)
        theirs = transformers.TrainingArguments(**early.arguments() | {"eval_strategy": "steps", "use_cpu": True})
        assert (theirs.metric_for_best_model, theirs.greater_is_better) == (metric or "loss", greater)


VALUES: tuple[tuple[str, object], ...] = (
    ("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("+3", 3), ("-1_000", "-1_000"), ("010", 10), ("0x1F", 31),
    ("0o17", 15), ("12:30", "12:30"), ("2020-01-01", "2020-01-01"), ("no", "no"), ("On", "On"), ("true", True),
    ("False", False), ("null", None), ("~", None), ("", None), ("-.inf", float("-inf")), ("'1e-4'", "1e-4"),
    ("!!str 1", "1"), ("[1, 1.0]", [1, 1.0]),
)  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_yaml_1_2(text: str, value: object) -> None:
    read, document = parse(text, "x")
    assert (read, type(read), document.problems) == (value, type(value), [])


def test_extends_merges_one_level(tmp_path: Path, file: Path) -> None:
    child = tmp_path / "configs" / "child.yaml"
    child.parent.mkdir()
    child.write_text("extends: ../x.yaml\ntraining: {max_steps: null, seed: 7}\nstrategies: {zero: null}\n")
    config = load(child)
    assert (config.training.learning_rate, config.training.seed, config.training.max_steps) == (1e-3, 7, -1)
    assert config.strategies == {}


def test_overrides_win_and_the_last_counts(file: Path) -> None:
    config = load(file, ["training.learning_rate=1e-4", "training.seed=1", "training.seed=2", "model.lora.r=4"])
    assert (config.training.learning_rate, config.training.seed) == (1e-4, 2)
    assert config.model.lora is not None and config.model.lora.r == 4
    assert load(file, ["strategies.zero=null"]).strategies == {}
    file.write_text(file.read_text().replace("{zero: {stage: 2}}", ""))
    assert load(file).strategies == {}
    assert load(file, ["strategies.zero=null"]).strategies == {}  # off already
    assert load(file, ["strategies.zero.stage=3"]).strategies["zero"].model_dump() == {"stage": 3}
    assert load(file, ["data.columns.text=body", "training.report_to=[wandb]"]).data.columns == {"text": "body"}


def test_frozen_and_checked_in_python_too(file: Path) -> None:
    config = load(file)
    with pytest.raises(ValidationError):
        config.training.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match=r"training\.fp16: cannot go with training\.bf16"):
        training = config.training.model_copy(update={"bf16": True, "fp16": True})
        RunConfig(model=config.model, data=config.data, training=training)


def test_errors_that_come_later_have_file_and_line(file: Path) -> None:
    """If they begin with a key, and not with a file whose name is like one."""
    config = load(file)
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.startswith("data:"))
    said = ["data.path: is none", "data.datasets[1].path: is none", "data.jsonl:1: broken", "model.yaml: is none", "no"]
    with pytest.raises(DataError) as caught, config.placing(), config.placing():
        raise DataError(said)
    assert list(caught.value.lines) == [f"{file}:{line}: {said[0]}", f"{file}:{line}: {said[1]}", *said[2:]]


def test_what_a_strategy_excludes(file: Path) -> None:
    """A key, or one value of a key; a key that is off may stay, and so may one beside other strategies."""
    compile, sampling = "training.torch_compile", "training.train_sampling_strategy"
    with pytest.raises(ConfigError) as refused:
        load(file, [f"{compile}=true", "strategies.linear={}"])
    (line,) = refused.value.lines
    what = "strategies.linear already decides how matrix products are taken; keep one of the two"
    assert line == f"command line: {compile} = true: {what}"
    load(file, [f"{compile}=false", "strategies.linear={}"])
    load(file, [f"{compile}=true", "strategies.offload={}"])
    with pytest.raises(ConfigError, match=r"batch_rebalance.*: it gives ranks of one copy of the model different rows"):
        load(file, [f"{sampling}=batch_rebalance", "strategies.pipeline={stages: 2}"])
    load(file, [f"{sampling}=group_by_length", "strategies.pipeline={stages: 2}"])


def test_dump_quotes_what_older_yaml_would_misread(file: Path) -> None:
    text = load(file, ["training.run_name='1e-4'"]).dump()
    assert "eval_strategy: 'no'" in text
    assert "run_name: '1e-4'" in text
    assert yaml.safe_load(text)["training"]["eval_strategy"] == "no"


def test_manual_is_current() -> None:
    for path, text in pages(ROOT / "docs"):
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m deepstow.trainer.config.doc"


# ---- fuzzing: any tree gives a config or a ConfigError, and a config survives dump and load ------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["no", "steps", "epoch", "bpe", "pydoc", "text", "1e-4", "true", "all", "best"]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def config_trees(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly valid sections with a few keys of ours set to anything, and now and then a stranger."""
    tree: dict[str, Any] = {"model": {"name_or_path": "m"}, "data": {"path": "pydoc"}}
    tree |= {"training": {"output_dir": "r"}, "strategies": {}}
    for key in draw(st.lists(st.sampled_from(known_keys()), max_size=4)):
        at: Any = tree
        *sections, name = key.split(".")
        for section in sections:
            at = at.setdefault(section, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict):
            at[name] = draw(trees)
    if draw(st.booleans()):
        tree[draw(st.text(max_size=6))] = draw(trees)
    return tree


def config_or_lines(path: Path) -> None:
    try:
        config = load(path)
    except ConfigError as error:
        assert error.lines
        assert all(line.startswith(f"{path}:") and line.isprintable() for line in error.lines)
        return
    again = path.with_name("again.yaml")
    again.write_text(config.dump(), encoding="utf-8")
    assert load(again) == config


@FUZZ
@given(tree=config_trees())
def test_any_tree(tree: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    config_or_lines(path)


@FUZZ
@given(content=st.one_of(st.binary(max_size=40), st.text("ab:{}[]-'\"\n\t &*!|>#%@,?1.e", max_size=40).map(str.encode)))
def test_any_bytes(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(content)
    config_or_lines(path)


@FUZZ
@given(overrides=st.lists(st.text(max_size=12) | st.sampled_from(known_keys()).map("{}=1".format), max_size=3))
def test_any_overrides(overrides: list[str], tmp_path: Path) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_text(QUICKSTART)
    try:
        load(path, overrides)
    except ConfigError as error:
        assert all(line.isprintable() for line in error.lines)
