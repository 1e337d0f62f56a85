"""Runs with a teacher: as a loop in which the teacher answers live; streamed, resumed, refused, on two ranks."""

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor

from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine import stowed_by as streamed_by
from deepstow.strategies.engine.tensors.quantised import keep_packing
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.data import prepare, pydoc_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError, ExitCode
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model import quantise
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning.streamed import placed
from deepstow.trainer.recipes.distill import TEACHER, teacher
from deepstow.trainer.run import data
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.checks import Before, check
from deepstow.trainer.run.data import read_data
from tests.e2e.commands import write_jsonl
from tests.helpers.marks import slowly

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, WORDS = 24, 300
SAID: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-2,
    "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "optim": "sgd",
}  # fmt: skip
BOTH: dict[str, Any] = {"on": "both", "hidden_weight": 0.5}
TIGHT = {"offload": {"gpu_memory": "900KiB"}}
TRAVEL = {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}, "recompute": {"policy": "full"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a teacher of many more blocks than the student, and one with other tokens."""
    home = tmp_path_factory.mktemp("models")
    texts = [{"text": row["text"]} for _, row in islice(pydoc_rows.rows("labels"), 24)]
    write_jsonl(home / "rows.jsonl", texts)
    words = tokenizers.trained(WORDS, home, (row["text"] for row in texts))
    for name, blocks, size in (("student", 2, WORDS), ("teacher", 30, WORDS + 8), ("other", 1, WORDS)):
        torch.manual_seed(blocks)
        config = transformers.LlamaConfig(
            vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=blocks, num_attention_heads=4,
            pad_token_id=0, eos_token_id=1, max_position_embeddings=LENGTH, initializer_range=0.3,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(home / name)
        (words if name != "other" else tokenizers.trained(280, home / "less", ["a"])).save_pretrained(home / name)
    config.hidden_size = 48
    config.save_pretrained(home / "wide")
    return home


def tree_of(home: Path, run: Path, strategies: Any = None, **changed: Any) -> dict[str, Any]:
    given = {
        "teacher": str(home / "teacher"),
        "alpha": 0.6,
        "temperature": 2.0,
        "top_k": "all",
        "teacher_batch_size": 3,
    }
    training = {**SAID, "output_dir": str(run), **changed.pop("training", {})}
    data = {"path": str(home / "rows.jsonl"), "max_length": LENGTH, **changed.pop("data", {})}
    sections = {"model": {"name_or_path": str(home / "student")}, "data": data, "training": training}
    return {**sections, "distill": {**given, **changed}, "strategies": strategies or {}}


def train(tree: dict[str, Any], ranks: Ranks | None = None) -> int:
    return runs.run(load_tree(tree), ranks or Ranks(), Stop())


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


class Live(transformers.Trainer):
    """Whose teacher answers in the step: the loss of two whole batches of logits."""

    teacher: Any
    hidden_weight = 0.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        with torch.no_grad():
            theirs = (self.teacher(**inputs).logits[:, :-1, :WORDS] / 2).log_softmax(-1)
            state = self.teacher.model(**inputs).last_hidden_state[:, :-1]
        said = model(**inputs, output_hidden_states=True)  # the last of them is after the norm
        logits, own = said.logits[:, :-1], said.hidden_states[-1][:, :-1]
        ours = (logits / 2).log_softmax(-1)
        divergence = (theirs.exp() * (theirs - ours)).sum(-1)[labels != -100].sum()
        by_data = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        apart = ((own - state).square().mean(-1) / state.square().mean(-1))[labels != -100].sum()
        return (0.6 * (4 * divergence + self.hidden_weight * apart) + 0.4 * by_data) / num_items_in_batch


@pytest.fixture(scope="module")
def plain(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without strategies."""
    run = tmp_path_factory.mktemp("plain") / "run"
    assert train(tree_of(home, run)) == 0
    return run


@pytest.fixture(scope="module")
def both(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that compares hidden states as well."""
    run = tmp_path_factory.mktemp("both") / "run"
    assert train(tree_of(home, run, **BOTH)) == 0
    return run


@pytest.mark.parametrize("on", [slowly("logits"), "both"])
def test_as_a_loop_with_a_live_teacher(home: Path, tmp_path: Path, on: str, request: pytest.FixtureRequest) -> None:
    """Rounding apart: the teacher's batches are others, and its answers are added up in another order."""
    plain: Path = request.getfixturevalue("plain" if on == "logits" else "both")
    given = {key: value for key, value in SAID.items() if key != "report_to"}
    arguments = transformers.TrainingArguments(
        str(tmp_path), **given, report_to="none", remove_unused_columns=False, lr_scheduler_type="linear"
    )
    model, live = (transformers.AutoModelForCausalLM.from_pretrained(home / name) for name in ("student", "teacher"))
    dataset: Any = read_data(load_tree(tree_of(home, plain)), Ranks(), quiet=True)[1].train
    trainer = Live(model=model, args=arguments, train_dataset=dataset, data_collator=Collator(0, packing=False))
    trainer.teacher = live.eval()
    trainer.hidden_weight = 0.0 if on == "logits" else BOTH["hidden_weight"]
    trainer.train()
    before = load_file(home / "student" / "model.safetensors")
    found, expected = weights(plain), {name: each.detach() for name, each in model.named_parameters()}
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-6)
        assert not torch.allclose(before[name], each, rtol=0, atol=1e-4)
    losses = [json.loads(line).get("loss") for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert [each for each in losses if each] == pytest.approx(
        [record["loss"] for record in trainer.state.log_history if "loss" in record], rel=1e-4
    )


def test_under_the_engine_and_resumed(home: Path, both: Path, tmp_path: Path) -> None:
    """The same bits with weights that travel, for a run that goes on from its second step; not with another teacher."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    assert train(tree_of(home, tmp_path / "run", TRAVEL, training=saves, **BOTH)) == 0
    assert same(weights(tmp_path / "run"), weights(both))
    again = {**saves, "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2")}
    assert train(tree_of(home, tmp_path / "again", TRAVEL, training=again, **BOTH)) == 0
    assert same(weights(tmp_path / "again"), weights(both))
    for other in ({**BOTH, "alpha": 0.5}, {}):
        assert train(tree_of(home, tmp_path / "other", training=again, **other)) == ExitCode.CONFIG
    changed = tmp_path / "teacher"
    changed.mkdir()
    for path in (home / "teacher").iterdir():
        (changed / path.name).write_bytes(path.read_bytes() + b" " * (path.name == "config.json"))
    tree = tree_of(home, tmp_path / "run", training={**saves, "resume_from_checkpoint": "auto", "max_steps": 6}, **BOTH)
    (home / "teacher").rename(home / "kept")
    changed.rename(home / "teacher")
    assert train(tree) == ExitCode.CONFIG
    (home / "teacher").rename(changed)
    (home / "kept").rename(home / "teacher")
    assert train(tree) == 0


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.slow
def test_a_teacher_is_streamed_and_asking_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device without room for it, and an end in the middle: the answers are those of one that was all there."""
    monkeypatch.setattr(prepare, "cache", lambda otherwise: tmp_path / "cache")
    monkeypatch.setattr(teacher, "PART_BYTES", 20 << 10)
    kept, asked = teacher.replace_file, 0

    def third_fails(path: Path, content: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise OSError("no space")
        kept(path, content)

    monkeypatch.setattr(teacher, "replace_file", third_fails)
    options = {"top_k": 4, "teacher_batch_size": 2, "training": {"max_steps": 1}}
    with pytest.raises(OSError, match="no space"):
        runs.before_training(runs.prepare(load_tree(tree_of(home, tmp_path / "a", TIGHT, **options)), Ranks()))
    assert "streamed through" in capsys.readouterr().out
    assert train(tree_of(home, tmp_path / "a", TIGHT, **options)) == 0
    (streamed,) = (tmp_path / "cache").glob("*/000000.arrow")
    parts = sorted(streamed.parent.glob("*.arrow"))
    assert asked == 1 + len(parts) > 4
    found = [path.read_bytes() for path in parts]
    parts[1].write_bytes(b"?" + found[1][1:])  # damaged, it is asked anew, of a teacher that fits
    assert train(tree_of(home, tmp_path / "b", **options)) == 0
    assert "answered already" in (said := capsys.readouterr().out) and "made anew" in said
    assert [path.read_bytes() for path in parts] == found


@pytest.mark.slow
def test_several_teachers(
    home: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The student learns from the average by weight, streamed or not; of a model with itself that is the model."""
    monkeypatch.setattr(prepare, "cache", lambda otherwise: tmp_path / "cache")
    again, second = home / "teacher", tmp_path / "second"
    shutil.copytree(home / "student", second)
    twin = shutil.copytree(again, tmp_path / "twin")
    of_twins = {str(again): 1, str(twin): 3}
    assert train(tree_of(home, tmp_path / "twins", {"offload": {"gpu_memory": "1100KiB"}}, teacher=of_twins)) == 0
    said = capsys.readouterr().out
    assert said.count("streamed through") >= 4 and "over the link" in said  # in the plan, and before it is asked
    for name, each in weights(plain).items():
        torch.testing.assert_close(weights(tmp_path / "twins")[name], each, rtol=0, atol=1e-6)
    shares = {str(again): 1.0, str(second): 3.0}
    assert train(tree_of(home, tmp_path / "two", teacher=shares, training={"max_steps": 1})) == 0
    tree = load_tree(tree_of(home, tmp_path / "two", teacher=shares))
    rows: Any = read_data(tree, Ranks(), quiet=True)[1].train
    kept = max((tmp_path / "cache").glob("*/000000.arrow"), key=lambda path: path.stat().st_mtime)
    answer = Dataset.from_file(str(kept))[0][TEACHER]
    ids = torch.tensor(rows[0]["input_ids"])[None]
    models = [transformers.AutoModelForCausalLM.from_pretrained(name) for name in shares]
    with torch.no_grad():
        one, other = ((each(input_ids=ids).logits[0, :-1, :WORDS] / 2).softmax(1) for each in models)
    found = torch.frombuffer(bytearray(answer), dtype=torch.float32).view(-1, WORDS).exp()
    torch.testing.assert_close(found, (one / 4 + 3 * other / 4)[-len(found) :], rtol=0, atol=1e-5)
    assert train(tree_of(home, tmp_path / "bad", teacher={str(again): 1, str(home / "other"): 1})) == ExitCode.CONFIG


def test_the_plan_says_what_a_teacher_takes(home: Path) -> None:
    """Counted by hand, and by the engine while it answers a batch."""
    config = load_tree(tree_of(home, home / "run", {"offload": {"gpu_memory": "900KiB"}}))
    (line,) = teacher.priced(config, 900 << 10, probe())
    layer = 4 * 32 * 32 + 3 * 32 * 48
    products, tokens = 30 * layer + 32 * (WORDS + 8), 3 * LENGTH
    attention = 30 * 2 * 2 * 3 * LENGTH * LENGTH * 32
    flops = float(line.partition("tokens takes ")[2].partition(" TFLOP")[0]) * 1e12
    assert flops == pytest.approx(2 * products * tokens + attention, rel=0.02)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "teacher")
    ((plan, _),) = teacher._place(config, 900 << 10, [model])
    with placed(model, plan, torch.device("cpu")) as call:
        engine = streamed_by(model).engine
        call(input_ids=torch.arange(24)[None])
        before = engine.transfer.bytes_up
        call(input_ids=torch.arange(24)[None])
        up = engine.transfer.bytes_up - before
    assert f"sends {human(up)} over the link" in line


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"on": "states"}, 'distill.on = "states": must be one of logits, hidden, both'),
        (
            {"on": "both", "teacher": "wide"},
            "hidden states of {home}/wide have 48 numbers, and the student's 32",
        ),
        ({"on": "hidden", "teacher": {"one": 1, "two": 1}}, "hidden states of several teachers have no average"),
        ({"hidden_weight": 2}, "distill.hidden_weight = 2: is for distill.on: hidden or both"),
        ({"teacher": {}}, "distill.teacher = {{}}: must be a folder or hub name, or several with a weight > 0 each"),
        ({"teacher": {"teacher": 0.0}}, "must be a folder or hub name, or several with a weight > 0 each"),
        ({"teacher": "other"}, "its tokenizer has {less} tokens, and that of {home}/student has 300"),
        ({"teacher": "nowhere"}, "distill.teacher = '{home}/nowhere': there is no such folder"),
        ({"strategies": {"tensor": {"degree": 2}}}, "strategies.tensor"),
        (
            {"strategies": TIGHT, "teacher_batch_size": 50, "temperature": 3.0},  # which nobody has asked for yet
            "distill.teacher_batch_size = 50: 1.1 MiB of weights and 2.8 MiB for logits",
        ),
        ({"data": {"streaming": True}}, "data.streaming = true: cannot go with distill"),
        (
            {"training": {"label_smoothing_factor": 0.1}},
            "training.label_smoothing_factor = 0.1: cannot go with distill",
        ),
        ({"alpha": 1.5}, "distill.alpha = 1.5: must be a number >= 0 and <= 1"),
        ({"temperature": 0.0}, "distill.temperature = 0.0: must be a number > 0"),
        ({"loss": "kl"}, 'distill.loss = "kl": must be one of forward_kl, reverse_kl, jsd'),
    ],
)
def test_refused(
    home: Path, tmp_path: Path, changed: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.endswith("no such folder"):
        monkeypatch.setattr(data.preparing, "prepare", None)  # said before rows are prepared
    if isinstance(changed.get("teacher"), str):
        changed = changed | {"teacher": str(home / changed["teacher"])}
    with pytest.raises(ConfigError) as error:
        config = load_tree(tree_of(home, tmp_path, **changed))
        ranks = Ranks()
        check(Before.MEETING, config=config, ranks=ranks)
        runs.prepare(config, ranks)
    less = len(tokenizers.PreTrainedTokenizerFast.from_pretrained(home / "other"))
    assert line.format(home=home, less=less) in str(error.value)


def test_room_on_the_disk(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: transformers.utils.ModelOutput(free=1000))
    with pytest.raises(ConfigError, match=r"distill.top_k = 7: .* answers take .* and .* has 1000 B free"):
        runs.prepare(load_tree(tree_of(home, tmp_path, top_k=7)), Ranks())


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_a_teacher_in_few_bits(home: Path, tmp_path: Path, bits: str) -> None:
    """Answers as of the model that anyone loads in them; the same where it is streamed, as its few bytes decide."""
    pytest.importorskip("bitsandbytes")
    config = load_tree(tree_of(home, tmp_path, teacher_dtype=bits, data={"limit": 1}))
    words, prepared = read_data(config, Ranks(), quiet=True)
    found, said = [], list[str]()
    for room in (560 << 10, (500 if bits == "int8" else 400) << 10):  # 173 KiB of it for logits
        lesson = teacher.lesson_of(config, words, prepared, config_of(config), room, tmp_path / str(room), said.append)
        place = (tmp_path / str(room), torch.device("cpu"), said.append)
        rows: Any = teacher.with_answers(config, lesson, words, prepared, *place, compares=False).train
        found.append(rows[:][TEACHER])
    assert found[0] == found[1]
    assert "all on the device" in said[0] and "streamed through" in said[1]
    assert bits != "int8" or "369.7 KiB of weights" in said[0]  # by hand: 30 x 9,984 B, and 77.0 KiB outside blocks
    exact = load_tree(tree_of(home, tmp_path, data={"limit": 1}))
    other = teacher.lesson_of(exact, words, prepared, config_of(exact), 20 << 20, tmp_path, said.append)
    assert other.key != lesson.key
    few = {"int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}[bits]
    options = {"quantization_config": transformers.BitsAndBytesConfig(**few), "device_map": {"": "cpu"}}
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "teacher", **options)
    keep_packing(model)
    asked = rows.remove_columns(TEACHER)
    batch = Collator(0, packing=False)([asked[i] for i in range(3)])  # int8 finds outliers by batch
    length = int((batch.pop("labels")[0, 1:] != -100).sum())
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[0, :length, :WORDS]
    mine = torch.frombuffer(bytearray(found[0][0]), dtype=torch.float32).view(-1, WORDS)
    torch.testing.assert_close(mine, (logits / 2).log_softmax(1), rtol=0, atol=1e-4)


def test_few_bits_without_bitsandbytes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"distill.teacher_dtype: needs the package bitsandbytes"):
        read_data(load_tree(tree_of(home, tmp_path, teacher_dtype="nf4")), Ranks(), quiet=True)
