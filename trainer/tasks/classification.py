"""Which of the labels a text, or a pair of texts, has: ``AutoModelForSequenceClassification`` with Transformers'
Trainer and padding collator, and a cross-entropy over the labels.

The labels are those of ``model.labels``, or of the saved model. A row has the name of one or its number. What is not
among them is an error of the row, since a label too many would be another model. Evaluations say accuracy and macro F1.

Refused: rows with several labels, and numbers to predict (regression); their losses are others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import nearest
from trainer.tasks.task import MULTIPLE, Field, Task

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import EvalPrediction, PretrainedConfig, PreTrainedTokenizerBase

    from trainer.config.sections import RunConfig


class Classification(Task):
    """One of several labels for each row."""

    name = "classification"
    fields = (Field("text", (str,)), Field("label", (str, int)), Field("text_pair", (str,), required=False))
    model_class = "transformers.AutoModelForSequenceClassification"
    adapters = "SEQ_CLS"
    pipeline_tag = "text-classification"

    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        texts = [row["text"] for row in rows]
        pairs = [row["text_pair"] for row in rows] if "text_pair" in rows[0] else None
        made = tokenizer(texts, pairs, truncation=True, max_length=data.max_length, verbose=False)
        labels = [number_of(row["label"], model) for row in rows]
        columns = [name for name in tokenizer.model_input_names if name in made]
        return [
            label if isinstance(label, str) else {**{name: made[name][index] for name in columns}, "labels": label}
            for index, label in enumerate(labels)
        ]

    def name_tokens(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Decoders read the logits at the last token that is no padding."""
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id

    def complete(self, given: dict[str, Any], config: RunConfig) -> dict[str, Any]:
        return {**given, "remove_unused_columns": True}  # what the tokenizer makes and the model does not take

    def options(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        from transformers import DataCollatorWithPadding

        return {
            "data_collator": DataCollatorWithPadding(tokenizer, pad_to_multiple_of=MULTIPLE),
            "compute_metrics": accuracy_and_f1,
            "preprocess_logits_for_metrics": most_likely,
        }

    def targets(self, ids: Tensor, config: RunConfig) -> dict[str, Any]:
        return {"labels": ids[:, 0]}

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        takes = inspect.signature((model.get_base_model() if config.model.lora else model).forward).parameters
        if "token_type_ids" not in takes:
            return super().forward(model, config)
        return lambda **inputs: model(token_type_ids=inputs["input_ids"], **inputs)  # zeros in both


def number_of(label: str | int, model: PretrainedConfig) -> int | str:
    """The number of a label, or a line about what is wrong with it."""
    names = {str(name): number for name, number in (model.label2id or {}).items()}
    if str(label) in names:
        return int(names[str(label)])
    number = int(label) if str(label).isdecimal() else -1
    if 0 <= number < len(names):
        return number
    known = ", ".join(list(names)[:20])
    return f"field 'label' is {label!r}, the labels are {known}{nearest(str(label), names)}; model.labels names them"


def most_likely(logits: Any, labels: Tensor) -> Tensor:
    """The number of the label with the largest logit. [B, L] -> [B]"""
    found: Tensor = (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
    return found


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Share of right labels, and the mean over labels of their F1."""
    found: Any = prediction.predictions
    truth: Any = prediction.label_ids
    scores = []
    for label in sorted({*found.tolist(), *truth.tolist()}):
        both, either = ((found == label) & (truth == label)).sum(), (found == label).sum() + (truth == label).sum()
        scores.append(2.0 * both / either)
    return {"accuracy": float((found == truth).mean()), "f1": float(sum(scores) / len(scores))}
