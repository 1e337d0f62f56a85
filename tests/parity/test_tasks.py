"""Every task, from a config and with weights that travel, ends with the bits of the Trainer that its users know, which
tokenises the same rows by itself. The models are opened from a folder, as both sides' users do."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler

from deepstow.trainer.config.load import load_tree
from deepstow.trainer.data import pydoc_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.run.checkpoints import checkpoint
from deepstow.trainer.run.session import run
from tests.e2e.commands import metrics, write_jsonl
from tests.helpers.releases import needs_embedding, needs_modules

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, TARGET = 48, 24
SAID: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "logging_steps": 1, "seed": 7, "gradient_accumulation_steps": 2,
}  # fmt: skip
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "q", "v"]}
TRL = {"gradient_checkpointing": False, "bf16": False, "max_length": LENGTH}  # what TRL's arguments have otherwise
TRAVELS: dict[str, Any] = {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}}
LABELS = ["prose", "code", "neither"]
TRIPLE = {"anchor": "prompt", "positive": "chosen", "negative": "rejected"}
# What a row's label becomes, and what the loss takes for it.
PROBLEMS: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Any], Any]]] = {
    "single_label_classification": (lambda row: row["label"], LABELS.index),
    "multi_label_classification": (
        lambda row: [row["label"], *(["neither"] if len(row["text"]) % 2 else [])],
        lambda label: [float(name in label) for name in LABELS],
    ),
    "regression": (lambda row: len(row["text"]) / 50, float),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Short ones, most of which fit into ``LENGTH`` tokens."""
    found = (row for _, row in islice(pydoc_rows.rows(name), 48))
    short = {"text": 9, "prompt": 5, "completion": 6, "chosen": 6, "rejected": 7}
    return [{key: " ".join(v.split()[: short[key]]) if key in short else v for key, v in row.items()} for row in found]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny saved models, and a tokenizer in each."""
    import transformers

    home = tmp_path_factory.mktemp("bases")
    words = tokenizers.trained(300, home, (row["text"] for row in rows_of("labels")))
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, max_position_embeddings=LENGTH,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=300,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    bert = transformers.BertConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    bart = transformers.BartConfig(
        vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=LENGTH, pad_token_id=0,
        bos_token_id=2, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=1,
    )  # fmt: skip
    models = {
        "llama": transformers.LlamaForCausalLM(llama),
        "t5": transformers.T5ForConditionalGeneration(t5),
        "bert": transformers.BertForMaskedLM(bert),
        "bart": transformers.BartForConditionalGeneration(bart),
    }
    for name, model in models.items():
        if name == "bert":
            words.chat_template = None  # as encoders have none; sentence-transformers would wrap each text in it
        model.save_pretrained(home / name)
        words.save_pretrained(home / name)
    return home


def generated(prediction: Any) -> dict[str, float]:
    """Numbers that say which tokens an evaluation has generated, and in which order."""
    ids = prediction.predictions * (prediction.predictions > 0)
    return {"sum": float((ids * np.arange(1, 1 + ids.size).reshape(ids.shape)).sum()), "columns": ids.shape[1]}


# --- as the users of each Trainer train ------------------------------------------------------------------------------


def classification(base: str, folder: str, lora: Any, problem: str = "single_label_classification") -> Any:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )  # fmt: skip

    words = AutoTokenizer.from_pretrained(base)
    rows, (label, target) = Dataset.from_list(rows_of("labels")), PROBLEMS[problem]
    made = rows.map(
        lambda row: {**words(row["text"], truncation=True, max_length=LENGTH), "labels": target(label(row))},
        remove_columns=rows.column_names,
    )
    set_seed(SAID["seed"])
    outputs = 1 if problem == "regression" else len(LABELS)
    told = {"num_labels": outputs, "problem_type": problem, "use_cache": False}
    model = AutoModelForSequenceClassification.from_pretrained(base, **told)
    model.accepts_loss_kwargs = False  # or Transformers adds up the losses of micro-batches
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, lora("SEQ_CLS"))
    collator = DataCollatorWithPadding(words, pad_to_multiple_of=8)
    return Trainer(model, TrainingArguments(folder, **SAID), train_dataset=made, data_collator=collator)


def seq2seq(base: str, folder: str, lora: Any, **more: Any) -> Any:
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        set_seed,
    )  # fmt: skip

    words = AutoTokenizer.from_pretrained(base)

    def features(row: dict[str, Any]) -> dict[str, Any]:
        labels = words(text_target=row["completion"] + words.eos_token, truncation=True, max_length=TARGET)["input_ids"]
        labels[-1] = words.eos_token_id
        return {**words(row["prompt"], truncation=True, max_length=LENGTH), "labels": labels}

    rows = Dataset.from_list(rows_of("pairs"))
    made = rows.map(features, remove_columns=rows.column_names)
    set_seed(SAID["seed"])
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    model.accepts_loss_kwargs = False
    for module in model.modules():  # T5's decoder has a config of its own; keys from a cache have other strides
        if hasattr(module, "config"):
            module.config.use_cache = False
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, lora("SEQ_2_SEQ_LM"))
    given = Seq2SeqTrainingArguments(folder, **SAID, **more)
    collator = DataCollatorForSeq2Seq(words, model=model, pad_to_multiple_of=8)
    more = {"train_dataset": made, "eval_dataset": made, "processing_class": words, "compute_metrics": generated}
    return Seq2SeqTrainer(model, given, data_collator=collator, **more)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


class OfMasters(torch.optim.AdamW):
    """AdamW of float32 copies, which it rounds into the parameters."""

    def __init__(self, rounded: list[torch.nn.Parameter], **options: Any) -> None:
        self.rounded = rounded
        super().__init__([each.detach().float() for each in rounded], fused=True, **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        masters = self.param_groups[0]["params"]
        for master, each in zip(masters, self.rounded, strict=True):
            master.grad, each.grad = each.grad.float(), None
        super().step()
        for master, each in zip(masters, self.rounded, strict=True):
            each.data.copy_(master)


def of_trl(task: str, rows: str, bits: Any = None, **said: Any) -> Callable[..., Any]:
    """A model's name, rows of text, and nothing else; of a quantised one the model."""

    def make(base: str, folder: str, lora: Any) -> Any:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig, set_seed

        from deepstow.trainer.tasks.task import TASKS, loaded

        kind, arguments = (loaded(name) for name in (TASKS[task].trainer, TASKS[task].arguments))
        more = {"peft_config": lora("SEQ_CLS" if task == "reward" else "CAUSAL_LM")} if lora else {}
        given = arguments(folder, **{**SAID, **TRL, **said})
        data, model = Dataset.from_list(rows_of(rows)), base
        if bits is not None:
            set_seed(SAID["seed"])
            auto = loaded(TASKS[task].model_class)
            options = {"num_labels": 1} if task == "reward" else {}
            options |= {"quantization_config": BitsAndBytesConfig(**bits), "device_map": {"": "cpu"}}
            model = auto.from_pretrained(base, dtype="float32", **options)
            model.config.use_cache = False
        elif task == "reward":  # TRL seeds again after the head is drawn if it is given a model
            set_seed(SAID["seed"])
            model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        return kind(model, args=given, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(base), **more)

    return make


def in_order(dataset: Any, **given: Any) -> Any:
    from sentence_transformers.base.sampler import DefaultBatchSampler

    return DefaultBatchSampler(SequentialSampler(dataset), **given)


def embedding(base: str, folder: str, lora: Any) -> Any:
    """With the loss that takes anchors in the same forward, and rows in their order."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.losses.merged_forward import embed_columns
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import set_seed

    class AtOnce(MultipleNegativesRankingLoss):
        def forward(self, sentence_features: Any, labels: Any) -> torch.Tensor:
            vectors = embed_columns(self.model, sentence_features, separate_first=False)
            return self.compute_loss_from_embeddings(vectors, labels)

    set_seed(SAID["seed"])
    model = SentenceTransformer(base, device="cpu")
    model.max_seq_length = LENGTH
    given = SentenceTransformerTrainingArguments(folder, **SAID, batch_sampler=in_order)
    rows = Dataset.from_list([{new: row[old] for new, old in TRIPLE.items()} for row in rows_of("preferences")])
    return SentenceTransformerTrainer(model, given, train_dataset=rows, loss=AtOnce(model))


STOCK: dict[str, tuple[str, Callable[..., Any]]] = {  # rows, and the Trainer
    "embedding": ("preferences", embedding),
    "classification": ("labels", classification),
    **{f"classification, {name}": ("labels", partial(classification, problem=name)) for name in PROBLEMS},
    "seq2seq": ("pairs", seq2seq),
    "seq2seq, smoothed": ("pairs", partial(seq2seq, label_smoothing_factor=0.1)),
    "dpo": ("preferences", of_trl("dpo", "preferences", precompute_ref_log_probs=True)),
    "dpo, lora": ("preferences", of_trl("dpo", "preferences")),
    "kto": ("ratings", of_trl("kto", "ratings", precompute_ref_log_probs=True)),
    "orpo": ("preferences", of_trl("orpo", "preferences")),
    "reward": ("preferences", of_trl("reward", "preferences")),
}


def lora_config(kind: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type=kind, **LORA)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def slow(*values: str, also: Sequence[Any] = ()) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow, *also])


CASES = [
    ("classification", "llama", ""), slow("seq2seq", "t5", ""), ("dpo", "llama", ""), ("reward", "llama", ""),
    slow("classification", "bert", "regression"),
    pytest.param("embedding", "bert", "", marks=needs_embedding),
    slow("classification", "bert", "multi_label_classification"),
    slow("classification", "llama", "lora", also=[needs_modules]), slow("dpo", "llama", "lora"),
    slow("kto", "llama", ""), slow("orpo", "llama", ""), ("seq2seq", "t5", "smoothed"),
    slow("seq2seq", "bart", "smoothed"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "model", "how"), CASES)
def test_as_the_trainer_that_its_users_know(task: str, model: str, how: str, bases: Path, tmp_path: Path) -> None:
    base = str(bases / model)
    rows, stock = STOCK.get(f"{task}, {how}") or STOCK[task]
    lora = how == "lora"
    theirs = stock(base, str(tmp_path / "stock"), lora_config if lora else None)
    theirs.train()
    theirs.save_model(str(tmp_path / "saved"))
    expected = tensors(tmp_path / "saved")

    section: dict[str, Any] = {"name_or_path": base}
    section |= {"labels": LABELS} if task == "classification" and how != "regression" else {}
    section |= {"problem_type": how} if how in PROBLEMS else {}
    section |= {"lora": LORA} if lora else {}
    given = [row | ({"label": PROBLEMS[how][0](row)} if how in PROBLEMS else {}) for row in rows_of(rows)]
    data = {"path": str(write_jsonl(tmp_path / "rows.jsonl", given)), "max_length": LENGTH}
    data |= {"max_target_length": TARGET} if task == "seq2seq" else {}
    data |= {"columns": TRIPLE} if task == "embedding" else {}
    said = SAID | ({"train_sampling_strategy": "sequential"} if task == "embedding" else {})
    said |= {"label_smoothing_factor": 0.1} if how == "smoothed" else {}
    tree = {"task": task, "model": section, "data": data, "training": {**said, "output_dir": str(tmp_path / "run")}}
    assert run(load_tree({**tree, "strategies": TRAVELS}), Ranks(), Stop()) == 0
    found = tensors(tmp_path / "run" / "export")
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
    before = tensors(Path(base))
    assert any(name not in before or not torch.equal(before[name], each) for name, each in found.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategies", "half"), [("dpo", TRAVELS, False), ("orpo", TRAVELS, False), ("reward", {}, True)]
)
def test_preferences_on_a_base_in_4_bits(
    task: str, strategies: dict[str, Any], half: bool, bases: Path, tmp_path: Path
) -> None:
    """TRL rounds the adapters of all but ORPO to bfloat16, and the memory engine has masters of what is in that."""
    base, rows = str(bases / "llama"), STOCK[task][0]
    bits = NF4 | ({"bnb_4bit_compute_dtype": "bfloat16"} if half else {})
    said = {"bf16": True} if half else {}
    theirs = of_trl(task, rows, bits, **said)(base, str(tmp_path / "stock"), lora_config)
    if strategies and task != "orpo":
        trained = [each for each in theirs.model.parameters() if each.requires_grad]
        theirs.optimizer = OfMasters(trained, lr=SAID["learning_rate"], weight_decay=0.0)
    theirs.train()
    theirs.save_model(str(tmp_path / "saved"))
    expected = tensors(tmp_path / "saved")

    section = {"name_or_path": base, "lora": LORA, "quantization_config": bits}
    data = {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows_of(rows))), "max_length": LENGTH}
    training = {**SAID, **said, "output_dir": str(tmp_path / "run")}
    tree = {"task": task, "model": section, "data": data, "training": training, "strategies": strategies}
    assert run(load_tree(tree), Ranks(), Stop()) == 0
    found = tensors(tmp_path / "run" / "export")
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
    losses = [
        [record["loss"] for record in log if "loss" in record]
        for log in (theirs.state.log_history, metrics(tmp_path / "run"))
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_preferences_go_on_with_an_adapter_which_is_their_reference(bases: Path, tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    base = str(bases / "llama")
    first: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora_config("CAUSAL_LM"))
    for name, each in first.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.1)
    first.save_pretrained(tmp_path / "first")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "first", is_trainable=True)
    given = DPOConfig(str(tmp_path / "stock"), **SAID, **TRL)
    data, words = Dataset.from_list(rows_of("preferences")), AutoTokenizer.from_pretrained(base)
    theirs = DPOTrainer(model, args=given, train_dataset=data, processing_class=words)
    theirs.train()
    theirs.model.save_pretrained(tmp_path / "saved", selected_adapters=["default"])

    tree: dict[str, Any] = {"task": "dpo", "model": {"adapter": str(tmp_path / "first")}, "strategies": TRAVELS}
    tree |= {"data": {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows_of("preferences"))), "max_length": LENGTH}}
    assert run(load_tree({**tree, "training": {**SAID, "output_dir": str(tmp_path / "run")}}), Ranks(), Stop()) == 0
    found, expected = tensors(tmp_path / "run" / "export"), tensors(tmp_path / "saved")
    assert found.keys() == expected.keys() and not (tmp_path / "run" / "export" / "ref").exists()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


@pytest.mark.slow
def test_evaluations_generate_what_those_of_the_stock_trainer_generate(bases: Path, tmp_path: Path) -> None:
    base, told = str(bases / "bart"), {"predict_with_generate": True, "generation_max_length": 12}
    theirs = seq2seq(base, str(tmp_path / "stock"), None, **told, generation_num_beams=2)
    theirs.train()
    expected = {key: value for key, value in theirs.evaluate().items() if key in ("eval_sum", "eval_columns")}
    assert expected["eval_sum"] > 0 and len(expected) == 2

    rows = str(write_jsonl(tmp_path / "rows.jsonl", rows_of("pairs")))
    data = {"path": rows, "eval_path": rows, "max_length": LENGTH, "max_target_length": TARGET}
    more = {"generation_num_beams": 2, "eval_strategy": "steps", "eval_steps": 3}
    said = {**SAID, **told, **more, "compute_metrics": "tests.parity.test_tasks:generated"}
    training = {**said, "output_dir": str(tmp_path / "run")}
    tree = {"task": "seq2seq", "model": {"name_or_path": base}, "data": data, "training": training}
    assert run(load_tree({**tree, "strategies": TRAVELS}), Ranks(), Stop()) == 0
    (found,) = (record for record in metrics(tmp_path / "run") if "eval_sum" in record)
    assert {key: found[key] for key in expected} == expected and 0 <= found["eval_exact_match"] <= 1


STREAM = {"streaming": True}


@pytest.fixture
def trained_on(bases: Path, tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    """Runs on 13 rows, of which a pass has 3 updates and one micro-batch more: what the one of a name has exported."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": row["text"][:30]} for row in rows_of("labels")[:13]]))

    def trained(name: str, data: dict[str, Any], **training: Any) -> dict[str, torch.Tensor]:
        tree = {"model": {"name_or_path": str(bases / "llama")}, "data": {"path": path, "max_length": LENGTH, **data}}
        tree |= {"training": {**SAID, **training, "output_dir": str(tmp_path / name)}, "strategies": {}}
        assert run(load_tree(tree), Ranks(), Stop()) == 0
        return tensors(tmp_path / name / "export")

    return trained


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], each) for name, each in other.items())


def test_a_stream_of_declared_rows_trains_as_many(trained_on: Any) -> None:
    """The same epochs, schedule and bits as rows that are prepared and taken in their order."""
    how = {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "sequential"}
    assert equal(trained_on("rows", {}, **how), trained_on("stream", {**STREAM, "rows": 13}, **how))


def test_a_stream_goes_on_in_a_later_pass(trained_on: Any, tmp_path: Path) -> None:
    """In a later pass, whose second update is the fifth; and where a shorter run has ended, which is in the first
    pass, of which that run has made all of its updates: not with its first rows again.
    """
    how = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "lr_scheduler_type": "constant"}
    whole = trained_on("whole", STREAM, **how)
    later = trained_on("later", STREAM, **how, resume_from_checkpoint=str(tmp_path / "whole/checkpoint-5"))
    assert equal(whole, later)
    epochs = [
        [record["epoch"] for record in metrics(tmp_path / name) if "loss" in record] for name in ("whole", "later")
    ]
    assert epochs[1] == epochs[0], "the checkpoint has the records of its steps"
    trained_on("short", STREAM, **how | {"max_steps": 2, "save_steps": 2})
    longer = trained_on("longer", STREAM, **how, resume_from_checkpoint=str(tmp_path / "short/checkpoint-2"))
    assert equal(whole, longer)


def test_a_checkpoint_knows_the_rows_that_trl_has_left(bases: Path, tmp_path: Path) -> None:
    """What a resume on other ranks divides (``trainer/run/checkpoints/same_rows.py``)."""
    rows = [{"chosen": "def", "rejected": "class " * (LENGTH if number == 5 else 1)} for number in range(12)]
    tree = {
        "task": "reward",
        "model": {"name_or_path": str(bases / "llama")},
        "data": {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "max_length": LENGTH},
        "training": {
            **SAID,
            "max_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "output_dir": str(tmp_path / "r"),
        },
        "strategies": {},
    }
    assert run(load_tree(tree), Ranks(), Stop()) == 0
    assert checkpoint.verified(tmp_path / "r" / "checkpoint-1").manifest.run.data.rows == 11
