"""A run is planned with rows as its collator makes them: what forward saves of real ones is what is planned."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.model import build
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.run.callbacks.plan_check import count_saved
from deepstow.trainer.run.collated import collated
from deepstow.trainer.tasks.task import TASKS
from tests.helpers.tiny import QWEN3, VOCAB, run_config

ROWS, LONGEST = 4, 64  # of a micro-batch; ``data.max_length``
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
T5: Mapping[str, Any] = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "vocab_size": VOCAB,
    "decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
BERT: Mapping[str, Any] = {
    "model_type": "bert", "vocab_size": VOCAB, **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Words:
    """As much of a tokenizer as padding needs."""

    padding_side = "right"

    def pad(self, rows: Sequence[Mapping[str, Any]], pad_to_multiple_of: int, **_: Any) -> dict[str, Any]:
        batch = Collator(0, packing=False)([{**row, "labels": row["input_ids"]} for row in rows])
        assert batch["input_ids"].shape[1] % pad_to_multiple_of == 0
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def run_of(task: str, model: Mapping[str, Any], **data: Any) -> RunConfig:
    config = run_config(model, per_device_train_batch_size=ROWS, data={"max_length": LONGEST, **data})
    return config.model_copy(update={"task": task})


def text(*lengths: int, documents: Sequence[int] = ()) -> dict[str, Any]:
    """A row of tokens; packed, if it has documents."""
    ids = [3] * (sum(documents) or lengths[0])
    positions = [place for length in documents for place in range(length)]
    return {"input_ids": ids, "labels": [3] * lengths[-1] if lengths else ids} | (
        {"position_ids": positions} if documents else {}
    )


CASES: Mapping[str, tuple[RunConfig, list[dict[str, Any]]]] = {
    "full": (run_of("sft", QWEN3), [text(LONGEST)] * ROWS),
    "short": (run_of("sft", QWEN3), [text(21), text(9), text(17), text(3)]),
    "alike, and padded": (run_of("sft", QWEN3), [text(21)] * ROWS),
    "packed, full": (run_of("sft", QWEN3, packing=True), [text(documents=[LONGEST])] * ROWS),
    "packed": (run_of("sft", QWEN3, packing=True), [text(documents=[LONGEST])] * 3 + [text(documents=[40, 24])]),
    "T5": (run_of("seq2seq", T5), [text(20, 9), text(5, 12), text(30, 3), text(8, 8)]),
    "BERT": (run_of("classification", {**BERT, "num_labels": 3}), [text(20), text(9), text(33), text(40)]),
}


def batch_of(config: RunConfig, rows: list[dict[str, Any]]) -> dict[str, Any]:
    words: Any = Words()
    if config.task == "seq2seq":
        batch = DataCollatorForSeq2Seq(words, pad_to_multiple_of=8)([dict(row) for row in rows])
        return {name: torch.as_tensor(value) for name, value in batch.items()}
    if config.task == "classification":
        batch = DataCollatorWithPadding(words, pad_to_multiple_of=8)([{"input_ids": row["input_ids"]} for row in rows])
        return {**batch, "labels": torch.zeros(ROWS, dtype=torch.long)}
    return Collator(0, config.data.packing)(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_of_the_longest_rows_is_what_is_planned(name: str) -> None:
    config, rows = CASES[name]
    batches = collated(config, Dataset.from_list(rows))
    planned = sum(unit.saved_bytes for unit in count_model(batches.config, masked=batches.masked).units)
    model: Any = build.build(config.model, config_of(config), seed=0, partitioned=False, task=TASKS[config.task])
    model.train()
    with count_saved(model) as storages:
        model(**batch_of(config, rows))
    assert planned == pytest.approx(sum(storages.values()), rel=0.01)
    unknown = collated(config, iter(rows))  # a stream
    assert unknown == (config, True)
    assert planned <= sum(unit.saved_bytes for unit in count_model(config).units)
    assert batches.masked == (name not in ("full", "packed, full"))


def test_rows_of_one_length_in_any_case() -> None:
    """Compiled blocks are given all rows as long as the longest that there may be."""
    config, rows = CASES["short"]
    compiled = run_config(QWEN3, data={"max_length": LONGEST}, torch_compile=True)
    assert collated(compiled, Dataset.from_list(rows)) == (compiled, True)
    assert collated(config, Dataset.from_list(rows)).config.data.max_length == 24
