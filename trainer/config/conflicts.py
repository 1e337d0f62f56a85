"""Combinations of keys that cannot be run, each valid alone.

The problem: most of these train for an hour and then fail (no evaluation data), or worse, run and mean
something else (two ways of saying where the loss lies).

The rule: one small function per conflict, from the dotted values of the config to a fault that names both keys
and says what would work. A check reads what it needs with ``values[...]``; if one of those keys is itself wrong
the check does not apply (KeyError), so one mistake is never reported twice, and the others still are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strategies.core.registry import available, find
from trainer.config.wording import MISSING, Fault

Values = Mapping[str, Any]


def _fault(values: Values, key: str, what: str) -> Fault:
    value = values.get(key, MISSING)
    return Fault(tuple(key.split(".")), MISSING if value is None else value, what)


def one_model(values: Values) -> Iterator[Fault]:
    name, config = values["model.name_or_path"], values["model.config"]
    if name is None and config is None:
        what = "missing; write a folder or hub name, or model.config for random weights"
        yield _fault(values, "model.name_or_path", what)
    if name is not None and config is not None:
        yield _fault(values, "model.config", "cannot go with model.name_or_path; keep one of the two")


def model_type(values: Values) -> Iterator[Fault]:
    config = values["model.config"]
    if config is not None and not (isinstance(config.get("model_type"), str) and config["model_type"]):
        key, value = ("model", "config", "model_type"), config.get("model_type", MISSING)
        lead = "missing; " if value is MISSING else ""
        yield Fault(key, value, f"{lead}must be the name of a Hugging Face architecture, as in llama")


def tokenizer_of_config(values: Values) -> Iterator[Fault]:
    if values["model.config"] is not None and values["model.tokenizer"] is None:
        what = "missing; model.config brings none: write a name, a folder or {train: bpe, vocab_size: 4096}"
        yield _fault(values, "model.tokenizer", what)


def vocabulary(values: Values) -> Iterator[Fault]:
    tokenizer, config = values["model.tokenizer"], values["model.config"]
    size = config.get("vocab_size") if config else None
    if isinstance(tokenizer, dict) and type(size) is int and size < tokenizer["vocab_size"]:
        key = ("model", "tokenizer", "vocab_size")
        yield Fault(key, tokenizer["vocab_size"], f"must be <= model.config.vocab_size, which is {size}")


def one_precision(values: Values) -> Iterator[Fault]:
    if values["training.bf16"] and values["training.fp16"]:
        yield _fault(values, "training.fp16", "cannot go with training.bf16; keep one of the two")


def weights_for_fp16(values: Values) -> Iterator[Fault]:
    if values["training.fp16"] and values["model.dtype"] == "bfloat16":
        what = "cannot go with training.fp16, which scales float32 weights; write float32, or training.bf16"
        yield _fault(values, "model.dtype", what)


def trainable_float16(values: Values) -> Iterator[Fault]:
    if values["model.dtype"] == "float16" and values["model.lora"] is None:
        what = "float16 weights lose their small updates; write float32 with training.fp16, or bfloat16"
        yield _fault(values, "model.dtype", what)


def float16_and_bf16(values: Values) -> Iterator[Fault]:
    if values["model.dtype"] == "float16" and values["model.lora"] is not None and values["training.bf16"]:
        what = "cannot go with model.dtype = float16; write bfloat16 there, or training.fp16"
        yield _fault(values, "training.bf16", what)


def _has_eval_data(values: Values) -> bool:
    return bool(values["data.eval_fraction"] or values["data.eval_path"] or values["data.eval_split"])


EVAL_DATA = "needs evaluation data; write data.eval_fraction, data.eval_split or data.eval_path"


def evaluation_without_data(values: Values) -> Iterator[Fault]:
    if values["training.eval_strategy"] != "no" and not _has_eval_data(values):
        yield _fault(values, "training.eval_strategy", EVAL_DATA)


def first_evaluation_without_data(values: Values) -> Iterator[Fault]:
    if values["training.eval_on_start"] and not _has_eval_data(values):
        yield _fault(values, "training.eval_on_start", EVAL_DATA)


def one_source_of_eval_data(values: Values) -> Iterator[Fault]:
    for key in ("data.eval_path", "data.eval_split"):
        if values["data.eval_fraction"] and values[key] and not values["data.streaming"]:
            yield _fault(values, "data.eval_fraction", f"cannot go with {key}; keep one of the two")
            return


def scheduler_without_evaluation(values: Values) -> Iterator[Fault]:
    scheduler = values["training.lr_scheduler_type"]
    if scheduler in ("reduce_lr_on_plateau", "greedy") and values["training.eval_strategy"] == "no":
        what = "follows the evaluation loss; write training.eval_strategy = steps or epoch"
        yield _fault(values, "training.lr_scheduler_type", what)


def endless_stream(values: Values) -> Iterator[Fault]:
    if values["data.streaming"] and values["training.max_steps"] == -1:
        yield _fault(values, "data.streaming", "a stream has no known length; write training.max_steps")


def fraction_of_stream(values: Values) -> Iterator[Fault]:
    if values["data.streaming"] and values["data.eval_fraction"]:
        what = "cannot go with data.streaming; write data.eval_split or data.eval_path"
        yield _fault(values, "data.eval_fraction", what)


def processes_of_stream(values: Values) -> Iterator[Fault]:
    if values["data.streaming"] and values["data.num_proc"] is not None:
        what = "cannot go with data.streaming; write training.dataloader_num_workers"
        yield _fault(values, "data.num_proc", what)


def one_mask(values: Values) -> Iterator[Fault]:
    if values["data.assistant_only_loss"] and values["data.completion_only_loss"]:
        what = "cannot go with data.completion_only_loss; keep one of the two"
        yield _fault(values, "data.assistant_only_loss", what)


def pydoc_forms(values: Values) -> Iterator[Fault]:
    if values["data.path"] == "pydoc" and values["data.name"] not in (None, "text", "pairs"):
        yield _fault(values, "data.name", "must be text or pairs, since data.path = pydoc")


def pydoc_completions(values: Values) -> Iterator[Fault]:
    text = values["data.path"] == "pydoc" and values["data.name"] in (None, "text")
    for key in ("data.completion_only_loss", "data.assistant_only_loss"):
        if text and values[key]:
            yield _fault(values, key, "pydoc text has no answers; write data.name = pairs, or leave it out")


def best_model(values: Values) -> Iterator[Fault]:
    evaluate, save = values["training.eval_strategy"], values["training.save_strategy"]
    if not values["training.load_best_model_at_end"] or save == "best":
        return
    if "no" in (evaluate, save) or evaluate != save:
        what = f"training.eval_strategy ({evaluate}) and training.save_strategy ({save}) must be equal, not no"
        yield _fault(values, "training.load_best_model_at_end", what)


def best_model_is_saved(values: Values) -> Iterator[Fault]:
    best, save = values["training.load_best_model_at_end"], values["training.save_strategy"]
    if not (best and save == values["training.eval_strategy"] == "steps"):
        return
    evaluate = values["training.eval_steps"] or values["training.logging_steps"]
    times = values["training.save_steps"] / evaluate
    if abs(times - round(times)) > 1e-6 or (values["training.save_steps"] < 1) != (evaluate < 1):
        what = f"must be a multiple of training.eval_steps ({evaluate}), for training.load_best_model_at_end"
        yield _fault(values, "training.save_steps", what)


def save_best_without_evaluation(values: Values) -> Iterator[Fault]:
    if values["training.save_strategy"] == "best" and values["training.eval_strategy"] == "no":
        what = "needs evaluations; write training.eval_strategy = steps or epoch"
        yield _fault(values, "training.save_strategy", what)


def save_best_without_metric(values: Values) -> Iterator[Fault]:
    if values["training.save_strategy"] == "best" and values["training.metric_for_best_model"] is None:
        yield _fault(values, "training.save_strategy", "needs training.metric_for_best_model, as in loss")


def warmup_beyond_end(values: Values) -> Iterator[Fault]:
    warmup, steps = values["training.warmup_steps"], values["training.max_steps"]
    if warmup is not None and steps != -1 and warmup > steps:
        yield _fault(values, "training.warmup_steps", f"must be <= training.max_steps, which is {steps}")


def loader_without_workers(values: Values) -> Iterator[Fault]:
    for key in ("training.dataloader_prefetch_factor", "training.dataloader_persistent_workers"):
        if values[key] and not values["training.dataloader_num_workers"]:
            yield _fault(values, key, "needs training.dataloader_num_workers >= 1")


def one_name_for_recompute(values: Values) -> Iterator[Fault]:
    for suffix in ("", "_kwargs"):
        old, new = f"training.gradient_checkpointing{suffix}", f"training.activation_checkpointing{suffix}"
        if values[old] is not None and values[new] is not None:
            yield _fault(values, new, f"is the newer name of {old}; keep one of the two")


def excluded_by_a_strategy(values: Values) -> Iterator[Fault]:
    for name in available():
        if name in values["strategies"]:
            for key, why in find(name).excludes.items():
                if values.get(key):
                    yield _fault(values, key, f"{why}; keep one of the two")


CHECKS: tuple[Callable[[Values], Iterator[Fault]], ...] = (
    one_model,
    model_type,
    tokenizer_of_config,
    vocabulary,
    one_precision,
    weights_for_fp16,
    trainable_float16,
    float16_and_bf16,
    evaluation_without_data,
    first_evaluation_without_data,
    one_source_of_eval_data,
    scheduler_without_evaluation,
    endless_stream,
    fraction_of_stream,
    processes_of_stream,
    one_mask,
    pydoc_forms,
    pydoc_completions,
    best_model,
    best_model_is_saved,
    save_best_without_evaluation,
    save_best_without_metric,
    warmup_beyond_end,
    loader_without_workers,
    one_name_for_recompute,
    excluded_by_a_strategy,
)


def conflicts(values: Values) -> list[Fault]:
    """Every conflict among ``values``; a key that is absent from them silences the checks that read it."""
    found: list[Fault] = []
    for check in CHECKS:
        try:
            found += check(values)
        except KeyError:
            continue
    return found
