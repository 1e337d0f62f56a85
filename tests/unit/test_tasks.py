"""Tasks: rows that are wrong, what is refused, and what they do to numbers of the plan."""

import dataclasses
import json
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM

from deepstow.strategies.parallel.deepspeed import ds_config
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.sections import LoraSection, QuantizationSection, RunConfig
from deepstow.trainer.data import bounds, rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.collate import check_batch
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, DataError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model import hub
from deepstow.trainer.model.build import load_config, of_head
from deepstow.trainer.planning import facts, from_config, hybrid
from deepstow.trainer.tasks import embedding, preference
from deepstow.trainer.tasks import task as tasks
from deepstow.trainer.tasks.classification import METRICS, accuracy_and_f1, mean_error, problem_of, rows_and_f1
from deepstow.trainer.tasks.seq2seq import texts_alike
from deepstow.trainer.tasks.task import TASKS
from deepstow.trainer.verify import verify
from tests.e2e.commands import write_jsonl
from tests.helpers.tiny import LLAMA, run_config

T5 = {"model_type": "t5", "vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizers.trained(300, tmp_path_factory.mktemp("words"), ["a good text", "a bad text"])


def config_of(task: str, strategies: dict[str, Any] | None = None, head: Any = (), **more: Any) -> RunConfig:
    labels = {"labels": ["good", "bad"]} if task == "classification" else {}
    labels |= {"labels": ["reward"]} if task == "reward" else {}
    given = run_config(LLAMA, strategies=strategies, **{"use_cpu": True, "per_device_train_batch_size": 2, **more})
    model = given.model.model_copy(update=labels | dict(head))
    return given.model_copy(update={"task": task, "model": model})


def made(
    task: str, given: list[dict[str, Any]], words: Any, folder: Path, head: Any = (), say: Any = str, **data: Any
) -> Any:
    """The rows of a run on ``given``."""
    path, config = write_jsonl(folder / "rows.jsonl", given), config_of(task, head=head)
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(path), **data})})
    opens: Any = lambda *hashes: None  # noqa: E731
    model = load_config(config.model)
    return rows.prepare(TASKS[task], config, words, model, folder / "data", say, opens, compares=True)


def test_classification_rows(words: Any, tmp_path: Path) -> None:
    given = [{"sentence": "a good text", "label": "good"}, {"sentence": "a bad text " * 9, "label": 1}]
    found = made("classification", given, words, tmp_path, columns={"text": "sentence"}, max_length=8)
    assert found.train["labels"][:] == [0, 1]
    assert [len(ids) for ids in found.train["input_ids"]] == [len(words("a good text")["input_ids"]), 8]
    again = made("classification", given, words, tmp_path, columns={"text": "sentence"}, max_length=8)
    assert again.fingerprint == found.fingerprint
    other = made("classification", given, words, tmp_path, columns={"text": "sentence"}, max_length=9)
    assert other.fingerprint != found.fingerprint


SEVERAL = {"problem_type": "multi_label_classification", "labels": ["a", "b", "c"]}
NUMBER = {"problem_type": "regression", "labels": None}
PAIR = {"problem_type": "regression", "labels": ["x", "y"]}


@pytest.mark.parametrize(
    ("head", "labels", "found"),
    [
        (SEVERAL, [["c", "a"], [1], [], [0.0, 1.0, 1.0]], [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1]]),
        (NUMBER, [2, -1.5], [2.0, -1.5]),
        (PAIR, [[2, -1.5]], [[2.0, -1.5]]),
        ({"labels": ["1", "2"]}, [1, "2"], [0, 1]),
    ],
)
def test_several_labels_and_numbers(head: Any, labels: list[Any], found: Any, words: Any, tmp_path: Path) -> None:
    given = [{"text": "a good text", "label": label} for label in labels]
    assert made("classification", given, words, tmp_path, head).train["labels"][:] == found


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (["good", "bad", "good"], "write under model: labels: [bad, good]"),
        ([2, 10, 1], 'write under model: labels: ["1", "2", "10"]'),
        (["yes", "New York"], 'write under model: labels: ["New York", "yes"]'),
        (["only"], "field 'label' is 'only', the labels are LABEL_0, LABEL_1"),
        ([f"l{each}" for each in range(300)], "has over 200 values: is it the column of the labels?"),
    ],
)
def test_labels_that_nobody_has_named_are_a_line_for_the_config(
    labels: list[Any], line: str, words: Any, tmp_path: Path
) -> None:
    given = [{"text": "a good text", "label": label} for label in labels]
    with pytest.raises(DataError) as refused:
        made("classification", given, words, tmp_path, {"labels": None, "config": {**LLAMA, "num_labels": 2}})
    (found,) = refused.value.lines
    assert line in found


def test_what_a_saved_model_is_told() -> None:
    """Without a word about it, one output is a number to Transformers' losses."""
    assert problem_of(LlamaConfig(num_labels=1)) == "regression"
    section = config_of("classification", head=PAIR).model
    assert of_head(section, load_config(section))["problem_type"] == "regression"


def test_seq2seq_rows_end_with_eos(words: Any, tmp_path: Path) -> None:
    given = [{"prompt": "a good text", "completion": text} for text in ("a", "a bad text " * 9)]
    found = made("seq2seq", given, words, tmp_path, max_target_length=5)
    assert [ids[-1] for ids in found.train["labels"]] == [words.eos_token_id] * 2
    assert len(found.train["labels"][1]) == 5


GOOD: dict[str, dict[str, Any]] = {
    "classification": {"text": "a", "label": "good"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
}


def bad_rows() -> Iterator[Any]:
    """The cases of ``bad_rows.txt``: task, model, row and line; ``role text`` is a turn of a conversation."""
    for line in (Path(__file__).parent / "bad_rows.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("task "):
            _, task, model = line.split(" ", 2)
        elif line.startswith("{"):
            row, _, said = line.partition(" => ")
            changed = {key: turned(value) for key, value in json.loads(row).items()}
            given = {key: value for key, value in (GOOD[task] | changed).items() if key != "prompt" or value}
            yield pytest.param(task, json.loads(model), given, said, id=line[:60])


def turned(value: Any) -> Any:
    is_chat = isinstance(value, list) and value and all(str(each).startswith(("user ", "assistant ")) for each in value)
    return [dict(zip(("role", "content"), each.split(), strict=True)) for each in value] if is_chat else value


@pytest.mark.parametrize(("task", "model", "row", "line"), bad_rows())
def test_bad_rows(task: str, model: Any, row: dict[str, Any], line: str, words: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        made(task, [row], words, tmp_path, model)
    (said,) = refused.value.lines
    assert line in said and "rows.jsonl:1: " in said


def test_what_is_wrong_is_said_once(words: Any, tmp_path: Path) -> None:
    """With the places of the first rows; of what is no matter of rows, with the key."""
    chats = [{name: turns("a") if name == "prompt" else turns("a", "b")[1:] for name in GOOD["dpo"]}] * 9
    plain = deepcopy(words)
    plain.chat_template = None
    with pytest.raises(DataError) as refused:
        made("dpo", chats, plain, tmp_path)
    (line,) = refused.value.lines
    assert line.startswith("data.chat_template: messages need one and the tokenizer has none; write chatml, ")
    with pytest.raises(DataError) as refused:
        made("classification", [{"text": "a", "label": "god"}] * 8, words, tmp_path)
    (line,) = refused.value.lines
    assert (
        line.count("field 'label' is 'god'") == 1 and line.count("rows.jsonl:") == 6 and line.endswith(" and 2 more)")
    )


def test_a_column_is_missing(words: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task dpo needs chosen \+ rejected, no 'chosen' in prompt, better"):
        made("dpo", [{"prompt": "a", "better": "b"}], words, tmp_path)


def turns(*texts: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


# Rows as they are published, and as TRL is given them where it refuses the first.
THEIRS = {"prompt": turns("a text"), "chosen": turns("", "good")[1:], "rejected": turns("", "bad")[1:]}
ANSWERS = ("\n\nHuman: a text?\n\nAssistant: a good text", "\n\nHuman: a text?\n\nAssistant: a bad text")
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hh-rlhf": (dict(zip(("chosen", "rejected"), ANSWERS, strict=True)), {}),
    "messages": ({"chosen": turns("a", "b", "c", "good"), "rejected": turns("a", "b", "c", "bad")}, {}),
    "ultrafeedback": (
        {"prompt": "a text", "chosen": turns("a text", "good"), "rejected": turns("a text", "bad")},
        THEIRS,
    ),
    "answers alone": (THEIRS | {"prompt": "a text"}, THEIRS),
    "text under messages": (THEIRS | {"chosen": "good", "rejected": "bad"}, THEIRS),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_preferences_have_the_tokens_that_trl_makes(form: str, words: Any, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    row, theirs = FORMS[form]
    model, before = (LlamaForCausalLM(LlamaConfig(**LLAMA)) for _ in range(2))

    def tokens(data: Any) -> Any:
        given = DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
        tokenised = DPOTrainer(model, before, given, train_dataset=data, processing_class=words).train_dataset
        return [tokenised[name][:] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]

    expected = tokens(Dataset.from_list([theirs or row] * 2))
    assert tokens(made("dpo", [row] * 2, words, tmp_path).train) == expected
    assert expected[1] != expected[2]


def refused(config: RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_config.check_options(config, 4)
    return list(caught.value.lines)


def test_strategies_that_are_refused() -> None:
    lines = refused(config_of("classification", {"tensor": {"degree": 2}}))
    assert any("strategies.tensor" in line and "cannot train task classification" in line for line in lines)
    lines = refused(config_of("seq2seq", {"pipeline": {"stages": 2}}, gradient_accumulation_steps=2))
    assert any("strategies.pipeline" in line and "cannot train task seq2seq" in line for line in lines)
    (line,) = refused(config_of("dpo", {"zero": {"stage": 1}}))
    assert "write model.lora, or add strategies.offload" in line
    from_config.check_options(config_of("dpo", {"zero": {"stage": 1}, "offload": {}}), 4)
    from_config.check_options(config_of("orpo", {"zero": {"stage": 1}}), 4)


@pytest.mark.parametrize(
    ("module", "task", "package", "extra"),
    [(preference, "reward", "trl", "tasks"), (embedding, "embedding", "sentence-transformers", "embedding")],
)
def test_without_its_package(module: Any, task: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    needs = f"needs the package {package}; install it with: pip install 'deepstow[{extra}]'"
    assert refused(config_of(task)) == [f'task = "{task}": {needs}']
    from_config.check_options(config_of("classification"), 1)


@pytest.mark.parametrize(
    ("modules", "pooling", "found"),
    [
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_mean_tokens": True}, ""),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, ""),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, "the pooling cls"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "the pooling [",
        ),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "a module Dense"),
        ((), {}, ""),
    ],
)
def test_parts_of_a_saved_sentence_transformer(
    modules: tuple[str, ...], pooling: dict[str, Any], found: str, tmp_path: Path
) -> None:
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in modules]
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    if modules:
        (tmp_path / "modules.json").write_text(json.dumps(listed))
    what = embedding.other_part(partial(hub.file_of, str(tmp_path)))
    assert what.startswith(found) and bool(what) == bool(found)


def test_texts_are_as_plain_where_the_export_is_opened(words: Any) -> None:
    """sentence-transformers wraps them in a chat template that it finds."""
    words, model = deepcopy(words), torch.nn.Linear(1, 1)
    words.chat_template = "{{ messages }}"
    TASKS["embedding"].name_tokens(model, words)
    assert words.chat_template is None and not TASKS["embedding"].counts_items(model)


def test_negatives_are_trained_on_if_they_are_named(words: Any, tmp_path: Path) -> None:
    triple = {"anchor": "a", "positive": "b", "negative": "c"}
    with pytest.raises(DataError, match=r"rows have a negative, too; write data.columns: {negative: negative}"):
        made("embedding", [triple], words, tmp_path)
    assert made("embedding", [triple], words, tmp_path, columns={"negative": "negative"}).train.column_names == [
        *triple
    ]
    with pytest.raises(DataError, match=r"rows.jsonl:2: field 'positive' has no tokens"):
        made("embedding", [{"anchor": "a", "positive": "b"}, {"anchor": "a", "positive": ""}], words, tmp_path)


def test_adapters_that_a_release_would_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "READS_MODULES", (99, 0))
    base: dict[str, Any] = {"config": None, "name_or_path": "base"}
    in_full = LoraSection(modules_to_save=["lm_head"])
    (line,) = refused(config_of("sft", head=base | {"lora": in_full}))
    assert line.startswith('model.lora = {"modules_to_save": ["lm_head"]}: Transformers before 5.18 does not load')
    (line,) = refused(config_of("classification", head=base | {"lora": LoraSection()}))
    assert "install 5.18, or write export: merged" in line
    merges = in_full.model_copy(update={"export": "merged"})
    for fine in (merges, LoraSection()):
        from_config.check_options(config_of("sft", head=base | {"lora": fine}), 1)


def test_labels_are_not_smoothed_where_a_row_has_several() -> None:
    config = config_of("classification", head=SEVERAL, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="multi_label_classification has no label whose share"):
        from_config.plan_of(config, Ranks(), probe())


def test_templates_that_trl_renders_are_bounded_before(
    words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(words, "chat_template", "{% if messages | length > 2 %}" + loops + "{% endif %}x")
    turn = [{"role": "user", "content": "a text"}]
    bad = [{"role": "assistant", "content": "bad"}]
    row = {"prompt": turn, "chosen": [{"role": "assistant", "content": "good"}] * 2, "rejected": bad}
    with pytest.raises(DataError, match=r"the tokenizer's chat template: one conversation takes over 0\.2 s to render"):
        made("dpo", [row], words, tmp_path)


def test_smoothed_labels_are_planned() -> None:
    """What is saved for backward includes the logits twice."""
    tree: dict[str, Any] = {"task": "seq2seq", "model": {"config": T5, "tokenizer": "none"}}
    tree |= {"data": {"path": "x", "max_length": 8}, "strategies": {"offload": {}}}
    tree |= {"training": {"output_dir": "x", "learning_rate": 1e-3, "max_steps": 1, "use_cpu": True}}
    plain, smoothed = (
        from_config.plan_of(load_tree({**tree, "training": {**tree["training"], **more}}), Ranks(), probe())
        for more in ({}, {"label_smoothing_factor": 0.1})
    )
    saved = [sum(unit.saved_bytes for unit in plan.facts.units) for plan in (plain, smoothed)]
    assert saved[1] > saved[0]


def test_a_head_in_few_bits_is_refused_where_the_loss_reads_it() -> None:
    bits = QuantizationSection(load_in_4bit=True, llm_int8_skip_modules=["q_proj"])
    head = {"lora": LoraSection(r=2, target_modules=["v_proj"]), "quantization_config": bits}
    with pytest.raises(ConfigError, match=r"llm_int8_skip_modules = \[\"q_proj\"\]: TRL multiplies with the head's"):
        from_config.plan_of(config_of("dpo", head=head), Ranks(), probe())
    named = bits.model_copy(update={"llm_int8_skip_modules": ["q_proj", "lm_head"]})
    plan = from_config.plan_of(config_of("dpo", head=head | {"quantization_config": named}), Ranks(), probe())
    assert plan.facts.run.trained_bytes == 2, "TRL rounds adapters to bfloat16"


def test_other_commands_are_for_language_models() -> None:
    config, machine = config_of("dpo", {"offload": {}}), probe()
    for call in (
        lambda: hybrid.search(config, Ranks(), machine, None, print),
        lambda: list(from_config.measure(config, Ranks(), machine, print)),
        lambda: verify.real_plan(config, 1),
    ):
        with pytest.raises(ConfigError, match=r'task = "dpo": .* is for sft and pretrain only'):
            call()


def test_a_pair_is_two_sequences_and_one_row_for_deepspeed() -> None:
    plan = from_config.plan_of(config_of("reward", {"zero": {"stage": 1}}), Ranks(world_size=2), probe())
    assert plan.facts.run.micro_batch == 4 and TASKS["kto"].sequences(config_of("kto")) == 1
    triples = config_of("embedding")
    triples = triples.model_copy(update={"data": triples.data.model_copy(update={"columns": {"negative": "n"}})})
    assert [TASKS["embedding"].sequences(each) for each in (config_of("embedding"), triples)] == [2, 3]
    assert ds_config(plan)["train_micro_batch_size_per_gpu"] == 2
    assert json.dumps(dataclasses.asdict(plan.facts.run)["sequences"]) == "2"


def test_the_head_that_is_counted_is_the_task_s() -> None:
    heads = {}
    for task in ("sft", "classification", "reward"):
        plan = from_config.plan_of(config_of(task), Ranks(), probe())
        heads[task] = plan.facts.units[-1].num_params
    width, vocab = LLAMA["hidden_size"], LLAMA["vocab_size"]
    assert heads == {"sft": width + width * vocab, "classification": width + 2 * width, "reward": width + width}


@pytest.mark.parametrize(
    ("task", "model", "line"),
    [
        ("sft", {"model_type": "bert"}, "bert models see the words that follow"),
        ("sft", {"model_type": "bert", "is_decoder": True}, None),
        ("sft", {"model_type": "bart"}, "Transformers compares what a bart says of a token with that token"),
        ("dpo", {"model_type": "bart"}, None),  # with a decoder alone, which Transformers makes of it; TRL's loss
        ("sft", {"model_type": "gpt_neox"}, None),
        ("classification", {"model_type": "bert"}, None),
        ("classification", {"model_type": "t5"}, "t5 models find the end of a text by its values, .* are seq2seq$"),
        (
            "seq2seq",
            dict(LLAMA),
            "llama models .* are classification, embedding, dpo, kto, reward, orpo, sft, pretrain$",
        ),
        ("reward", {"model_type": "bart"}, "bart models find the end of a text by its values"),
        ("sft", {"model_type": "t5"}, "t5 models are not for it: .*; its tasks are seq2seq$"),
        ("seq2seq", {"model_type": "bert"}, ".*; its tasks are classification, embedding, reward$"),
    ],
)
def test_models_that_no_plan_or_task_can_have(task: str, model: dict[str, Any], line: str | None) -> None:
    config = config_of(task)
    config = config.model_copy(update={"model": config.model.model_copy(update={"config": {**model}})})
    if line is None:
        facts.check_model(config, load_config(config.model))
        return
    with pytest.raises(ConfigError, match=f'task = "{task}": {line}'):
        facts.check_model(config, load_config(config.model))


def test_what_is_not_read_and_what_teaches_nothing_is_said(words: Any, tmp_path: Path) -> None:
    said: list[str] = []
    given = [{"prompt": "a", "chosen": "b", "rejected": each, "id": 1} for each in ("c", "b", "b")]
    made("dpo", given, words, tmp_path, say=said.append)
    path = tmp_path / "rows.jsonl"
    same = f"data: chosen and rejected are the same in 2 of 3 rows, the first at {path}:2: no preference"
    assert said[:2] == [f"data: {path}: columns that are not read: id", f"WARNING: {same}"]
    with pytest.raises(DataError, match=r"the same in 2 of 2 rows, the first at .*: there is nothing to prefer"):
        made("dpo", given[1:], words, tmp_path)
    with pytest.raises(DataError, match="later rows are of another form than the first 256"):
        made("dpo", [GOOD["dpo"]] * 256 + [{name: turns("a", "b")[1:] for name in GOOD["dpo"]}], words, tmp_path)


def test_no_full_batch() -> None:
    config = config_of("dpo", dataloader_drop_last=True)
    check_batch(config, range(4), 2)
    check_batch(config_of("dpo"), range(3), 2)
    with pytest.raises(ConfigError, match="dataloader_drop_last = true: the data has 3 rows, and a batch has 4"):
        check_batch(config, range(3), 2)


def test_metrics(words: Any) -> None:
    found = accuracy_and_f1(EvalPrediction(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])))
    assert found == {"accuracy": 0.75, "f1": pytest.approx((2 / 3 + 4 / 5) / 2)}
    truth = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    likely = METRICS["multi_label_classification"]["preprocess_logits_for_metrics"](
        torch.tensor([[2.0, -1, -1], [1, -2, -1]]), truth
    )
    found = rows_and_f1(EvalPrediction(likely.numpy(), truth))
    assert found == {"accuracy": 0.5, "f1": pytest.approx((1 + 0) / 2)}
    assert mean_error(EvalPrediction(np.array([[1.0], [4.0]]), np.array([2.0, 1.0]))) == {"mae": 2.0}
    ids, pad = words("a good text")["input_ids"], words.pad_token_id
    rows_of = np.array([[pad, *ids, words.eos_token_id], [pad, *ids[::-1], words.eos_token_id]])
    wanted = np.array([[*ids, words.eos_token_id, -100]] * 2)
    found = texts_alike(words, EvalPrediction(rows_of, wanted))
    assert found == {"exact_match": 0.5, "gen_len": len(ids) + 1}
