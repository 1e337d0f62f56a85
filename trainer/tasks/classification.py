"""Which labels a text, or a pair of texts, has, or which numbers: ``AutoModelForSequenceClassification`` with
Transformers' Trainer and padding collator.

``model.problem_type``, or the saved model, says whether a row has one label (cross-entropy), any number of them (a
binary cross-entropy for each label), or numbers (mean squared error). The labels are those of ``model.labels``, or of
the saved model. What is not among them is an error of the row, since a label too many would be another model.

Invariant. The loss of a step is the mean over its micro-batches. Transformers' Trainer adds them up where a forward
takes any keyword, though none of these losses counts what it is given (``accepts_loss_kwargs``).

Refused: smoothed labels where a row has several or numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.protocol import Refusal
from deepstow.trainer.errors import kind, nearest
from deepstow.trainer.tasks.task import MULTIPLE, TASKS, Field, Saved, Task, token_types
from deepstow.trainer.values import Found, Values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import EvalPrediction, PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig


UNNAMED = re.compile(r"LABEL_\d+")  # Transformers' name of a label that nobody has named
MOST = 200  # labels that a line lists
ONE = "single_label_classification"
SEVERAL = "multi_label_classification"
NUMBERS = "regression"


@TASKS.add
class Classification(Task):
    """Labels, or numbers, for each row."""

    name = "classification"
    fields = (Field("text", (str,)), Field("label", ()), Field("text_pair", (str,), required=False))
    model_class = "transformers.AutoModelForSequenceClassification"
    adapters = "SEQ_CLS"
    drops_columns = True  # of what the tokenizer makes
    pipeline_tag = "text-classification"
    keys = ("model.labels", "model.problem_type")
    metrics = ("loss", "accuracy", "f1", "mae")

    def conflicts(self, m: Values, d: Values, t: Values) -> Found:
        in_config = isinstance(m.config, dict) and ("id2label" in m.config or "num_labels" in m.config)
        several = m.problem_type is None or m.problem_type == ONE
        if m.labels is None and m.name_or_path is None and not in_config and m.problem_type != NUMBERS:
            yield "model.labels", "missing; write the names of the labels, as in [negative, positive]"
        if isinstance(m.labels, list) and len(set(m.labels)) != max(1 + several, len(m.labels)):
            yield "model.labels", f"must be {'at least two names, all' if several else 'names, all'} different"

    def refuses_model(self, config: RunConfig, model: PretrainedConfig, saved: Saved) -> Iterator[Refusal]:
        if config.training.label_smoothing_factor and (problem := problem_of(model)) != ONE:
            what = f"{problem} has no label whose share could be taken from it; leave it out"
            yield Refusal("training.label_smoothing_factor", config.training.label_smoothing_factor, what)

    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        texts = [row["text"] for row in rows]
        pairs = [row["text_pair"] for row in rows] if "text_pair" in rows[0] else None
        encoded = tokenizer(texts, pairs, truncation=True, max_length=data.max_length, verbose=False)
        labels = [target_of(row["label"], model) for row in rows]
        columns = [name for name in tokenizer.model_input_names if name in encoded]
        return [
            label if isinstance(label, str) else {**{name: encoded[name][index] for name in columns}, "labels": label}
            for index, label in enumerate(labels)
        ]

    def cure(self, rows: Iterable[Mapping[str, Any]], model: PretrainedConfig) -> str:
        """The line for the config, where the model has no names of labels yet."""
        if problem_of(model) == NUMBERS or not all(map(UNNAMED.fullmatch, map(str, model.label2id or ()))):
            return ""
        labels = set[Any]()
        for row in rows:
            label = row.get("label")
            labels |= {value for value in (label if isinstance(label, list) else [label]) if type(value) in (str, int)}
            if len(labels) > MOST:
                return f"field 'label' has over {MOST} values: is it the column of the labels? model.labels names them"
        numbers = [label for label in labels if isinstance(label, int)]
        names = sorted(numbers) if len(numbers) == len(labels) else sorted(map(str, labels))
        if len({*map(str, names)}) < 2:
            return ""
        listing = ", ".join(map(_plain, map(str, names)))
        return f"the model has no names of the labels that the rows have; write under model: labels: [{listing}]"

    def name_tokens(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Decoders read the logits at the last token that is no padding."""
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id

    def options(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        from transformers import DataCollatorWithPadding

        return {
            "data_collator": DataCollatorWithPadding(tokenizer, pad_to_multiple_of=MULTIPLE),
            **METRICS[problem_of(model.config)],
        }

    def targets(self, ids: Tensor, config: RunConfig) -> dict[str, Any]:
        return {"labels": ids.new_zeros(len(ids))}

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        problem, count = problem_of(model.config), model.config.num_labels

        def run(**inputs: Any) -> Any:
            if problem != ONE:
                inputs["labels"] = inputs["labels"].new_zeros(len(inputs["labels"]), count).float()
            return model(**inputs, **token_types(model, config, inputs["input_ids"]))

        return run


def _plain(name: str) -> str:
    """A name as it is written in YAML."""
    words = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
    return name if re.fullmatch(r"[A-Za-z][\w-]*", name) and name.lower() not in words else json.dumps(name)


def problem_of(model: PretrainedConfig) -> str:
    """What a model predicts, as its loss takes it."""
    return model.problem_type or (NUMBERS if model.num_labels == 1 else ONE)


def target_of(label: Any, model: PretrainedConfig) -> int | float | list[float] | str:
    """What the loss takes for the label of a row, or a line about what is wrong with it."""
    problem, count = problem_of(model), int(model.num_labels or 0)
    if problem == ONE:
        return number_of(label, model)
    several = problem == SEVERAL or count > 1
    if several and not isinstance(label, list):
        return f"field 'label' is {kind(label)}; every row needs a list: the problem is {problem} of {count}"
    values = label if several else [label]
    if problem == NUMBERS:
        if len(values) != count or any(type(value) not in (int, float) or not math.isfinite(value) for value in values):
            return f"field 'label' is {label!r}; every row needs {f'{count} numbers' if several else 'a number'}"
        targets = list(map(float, values))
        return targets if several else targets[0]
    if len(values) == count and {*map(type, values)} == {float} and {*values} <= {0.0, 1.0}:
        return list(values)  # for each label, whether the row has it
    if count == len(values) == 2 and {*map(type, values)} == {int} and {*values} == {0, 1}:
        return (
            f"field 'label' is {label!r}, numbers of both labels or one of them; write names, or 0.0 and 1.0 for each"
        )
    numbers = [number_of(value, model) for value in values]
    if wrong := [number for number in numbers if isinstance(number, str)]:
        return wrong[0]
    if len({*numbers}) < len(numbers):
        return f"field 'label' is {label!r}, with a label twice; for each label whether it is there are 0.0 and 1.0"
    return [float(number in numbers) for number in range(count)]


def number_of(label: Any, model: PretrainedConfig) -> int | str:
    """The number of a label, or a line about what is wrong with it."""
    if type(label) not in (str, int):
        return f"field 'label' is {kind(label)}; every row needs a string or an integer"
    names = {str(name): number for name, number in (model.label2id or {}).items()}
    if str(label) in names:
        return int(names[str(label)])
    decimal_names = any(name.isdecimal() for name in names)  # as stars are, from 1 to 5: a number is a name there
    number = int(label) if str(label).isdecimal() and not decimal_names else -1
    if 0 <= number < len(names):
        return number
    shown = ", ".join(list(names)[:20])
    return f"field 'label' is {label!r}, the labels are {shown}{nearest(str(label), names)}; model.labels names them"


def kept(choose: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """What an evaluation keeps of logits [B, L], to which other outputs may have been added."""
    return lambda outputs, labels: choose(outputs[0] if isinstance(outputs, tuple) else outputs)


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Share of right labels, and the mean over labels of their F1."""
    guess: Any = prediction.predictions
    truth: Any = prediction.label_ids
    scores = []
    for label in sorted({*guess.tolist(), *truth.tolist()}):
        both, either = ((guess == label) & (truth == label)).sum(), (guess == label).sum() + (truth == label).sum()
        scores.append(2.0 * both / either)
    return {"accuracy": float((guess == truth).mean()), "f1": float(sum(scores) / len(scores))}


def rows_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Share of rows with exactly their labels, and the mean of F1 over labels that are there or were found."""
    guess: Any = prediction.predictions
    truth: Any = prediction.label_ids
    both, either = (guess * truth).sum(0), guess.sum(0) + truth.sum(0)
    scores = 2.0 * both[either > 0] / either[either > 0]
    return {"accuracy": float((guess == truth).all(1).mean()), "f1": float(scores.mean()) if len(scores) else 1.0}


def mean_error(prediction: EvalPrediction) -> dict[str, float]:
    """The mean absolute error; the loss is the squared one."""
    guess: Any = prediction.predictions
    return {"mae": float(abs(guess.reshape(-1) - prediction.label_ids.reshape(-1)).mean())}  # type: ignore[union-attr]


METRICS: Mapping[str, dict[str, Any]] = {
    problem: {"compute_metrics": measure, "preprocess_logits_for_metrics": kept(choose)}
    for problem, measure, choose in (
        (ONE, accuracy_and_f1, lambda logits: logits.argmax(-1)),
        (SEVERAL, rows_and_f1, lambda logits: (logits > 0).int()),  # labels that are likelier than not
        (NUMBERS, mean_error, lambda logits: logits.float()),
    )
}
