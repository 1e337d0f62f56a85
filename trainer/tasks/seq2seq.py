"""One text from another by an encoder and a decoder: T5, BART and their kind, with ``AutoModelForSeq2SeqLM``,
Transformers' ``Seq2SeqTrainer`` and its collator.

A prompt has up to ``data.max_length`` tokens, a completion up to ``data.max_target_length``; longer ones are cut. A
completion ends with the tokenizer's eos, or generation would not end. Evaluations say the mean loss over tokens; with
``training.predict_with_generate`` they generate instead, and say how many texts are those of the data.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from deepstow.trainer.tasks.task import (
    MASKED,
    MULTIPLE,
    OF_TOKENS,
    TASKS,
    Field,
    Task,
    losses_of,
    mean_over_tokens,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import EvalPrediction, PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig


@TASKS.add
class Seq2Seq(Task):
    """A completion for each prompt."""

    name = "seq2seq"
    fields = (Field("prompt", (str,)), Field("completion", (str,)))
    model_class = "transformers.AutoModelForSeq2SeqLM"
    trainer = "transformers.Seq2SeqTrainer"
    arguments = "transformers.Seq2SeqTrainingArguments"
    adapters = "SEQ_2_SEQ_LM"
    drops_columns = True
    pipeline_tag = "text2text-generation"
    keys = (
        "data.max_target_length",
        "training.predict_with_generate",
        "training.generation_max_length",
        "training.generation_num_beams",
    )
    metrics = (*OF_TOKENS, "exact_match", "gen_len")

    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        limit = data.max_length
        most = target_length(data)
        eos = tokenizer.eos_token_id
        prompts = tokenizer([row["prompt"] for row in rows], truncation=True, max_length=limit, verbose=False)
        texts = [row["completion"] for row in rows]
        targets = tokenizer(text_target=texts, truncation=True, max_length=most, verbose=False)["input_ids"]
        labels = [ids if eos is None or ids[-1:] == [eos] else [*ids[: most - 1], eos] for ids in targets]
        return [{"input_ids": ids, "labels": target} for ids, target in zip(prompts["input_ids"], labels, strict=True)]

    def name_tokens(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """A decoder of random weights begins with padding, as T5's."""
        for config in (model.config, model.generation_config):
            if getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = tokenizer.pad_token_id

    def counts_items(self, model: Any) -> bool:
        """T5 and BART compute their loss by themselves."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return "self.loss_function(" in inspect.getsource(type(base).forward)

    def options(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        from transformers import DataCollatorForSeq2Seq

        collator = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=MULTIPLE)
        if config.training.predict_with_generate:
            return {"data_collator": collator, "compute_metrics": partial(texts_alike, tokenizer)}
        losses = {"compute_metrics": mean_over_tokens, "preprocess_logits_for_metrics": token_losses}
        return {"data_collator": collator, **losses}

    def targets(self, ids: Tensor, config: RunConfig) -> dict[str, Any]:
        """Smoothed labels are not given to forward, which shifts them otherwise; the collator has done so, too."""
        labels = ids.new_zeros(len(ids), target_length(config.data))
        return {"labels": labels} | ({"decoder_input_ids": labels} if config.training.label_smoothing_factor else {})

    def probe(self, ids: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "decoder_input_ids": ids}


def target_length(data: Any) -> int:
    """Tokens of a completion at most."""
    return int(data.max_target_length or data.max_length)


def token_losses(logits: Any, labels: Tensor) -> Tensor:
    """``losses_of`` what forward gives, other outputs among it."""
    return losses_of(logits[0] if isinstance(logits, tuple) else logits, labels)


def texts_alike(tokenizer: PreTrainedTokenizerBase, prediction: EvalPrediction) -> dict[str, float]:
    """Share of generated texts that are those of the data, and how many tokens they have."""
    sides: Any = (prediction.predictions, prediction.label_ids)
    generated, expected = (
        [[token for token in row if token not in (MASKED, tokenizer.pad_token_id)] for row in rows.tolist()]
        for rows in sides
    )
    texts = [tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in (generated, expected)]
    alike = sum(text.strip() == reference.strip() for text, reference in zip(*texts, strict=True))
    return {"exact_match": alike / len(expected), "gen_len": sum(map(len, generated)) / len(generated)}
