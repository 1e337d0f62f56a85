"""Combinations of keys that cannot be run, although each key alone is valid.

Most of them would train for an hour and then fail (no evaluation data), or would run and mean something else (two ways
of saying which tokens count).

``PAIRS`` are two keys of which one may be given; ``CHECKS`` has the key to report, any other condition, and what would
work. Conflicts whose words depend on values are functions. A check reads what it needs with ``values[...]``. If one of
those keys is itself wrong, it is missing from ``values``, and the KeyError skips this check only: one mistake is never
reported twice, and independent ones are all reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from strategies.core.protocol import Requirement
from strategies.core.registry import available, find
from trainer.config.wording import MISSING, Fault

Values = Mapping[str, Any]
KEEP_ONE = "keep one of the two"
UNSET = (None, False)  # and 0.0, which is equal to False
PLANNED = {Requirement.PARAMETERS, Requirement.COMPUTE_DTYPE}
EVALUATE = "write training.eval_strategy = steps or epoch"
EVAL_DATA = "needs evaluation data; write data.eval_fraction, data.eval_split or data.eval_path"


def _has_eval_data(values: Values) -> bool:
    return bool(values["data.eval_fraction"] or values["data.eval_path"] or values["data.eval_split"])


# The key to report, the key that it cannot go with, and what to do.
PAIRS: tuple[tuple[str, str, str], ...] = (
    ("model.config", "model.name_or_path", KEEP_ONE),
    ("training.fp16", "training.bf16", KEEP_ONE),
    ("data.eval_fraction", "data.streaming", "write data.eval_split or data.eval_path"),
    ("data.num_proc", "data.streaming", "write training.dataloader_num_workers"),
    ("data.assistant_only_loss", "data.completion_only_loss", KEEP_ONE),
)
CHECKS: tuple[tuple[str, Callable[[Values], object], str], ...] = (
    (
        "model.name_or_path",
        lambda v: v["model.name_or_path"] is None and v["model.config"] is None,
        "missing; write a folder or hub name, or model.config for random weights",
    ),
    (
        "model.tokenizer",
        lambda v: v["model.config"] is not None and v["model.tokenizer"] is None,
        "missing; model.config brings none: write a name, a folder or {train: bpe, vocab_size: 4096}",
    ),
    (
        "model.dtype",
        lambda v: v["training.fp16"] and v["model.dtype"] == "bfloat16",
        "cannot go with training.fp16, which scales float32 weights; write float32, or training.bf16",
    ),
    (
        "model.dtype",
        lambda v: v["model.dtype"] == "float16" and v["model.lora"] is None,
        "float16 weights lose their small updates; write float32 with training.fp16, or bfloat16",
    ),
    (
        "training.bf16",
        lambda v: v["model.dtype"] == "float16" and v["model.lora"] is not None and v["training.bf16"],
        "cannot go with model.dtype = float16; write bfloat16 there, or training.fp16",
    ),
    ("training.eval_strategy", lambda v: v["training.eval_strategy"] != "no" and not _has_eval_data(v), EVAL_DATA),
    ("training.eval_on_start", lambda v: v["training.eval_on_start"] and not _has_eval_data(v), EVAL_DATA),
    (
        "training.lr_scheduler_type",
        lambda v: (
            v["training.lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy")
            and v["training.eval_strategy"] == "no"
        ),
        f"follows the evaluation loss; {EVALUATE}",
    ),
    (
        "training.dataloader_persistent_workers",
        lambda v: v["training.dataloader_persistent_workers"],
        "a resumed run would draw other random numbers than one that was not interrupted; leave it out",
    ),
    (
        "training.gradient_checkpointing_kwargs",
        lambda v: (v["training.gradient_checkpointing_kwargs"] or {}).get("preserve_rng_state") is False,
        "recomputing would draw another dropout mask; leave preserve_rng_state out",
    ),
    (
        "data.streaming",
        lambda v: v["data.streaming"] and v["training.max_steps"] == -1,
        "a stream has no known length; write training.max_steps",
    ),
    (
        "data.name",
        lambda v: v["data.path"] == "pydoc" and v["data.name"] not in (None, "text", "pairs"),
        "must be text or pairs, since data.path = pydoc",
    ),
    (
        "training.save_strategy",
        lambda v: v["training.save_strategy"] == "best" and v["training.eval_strategy"] == "no",
        f"needs evaluations; {EVALUATE}",
    ),
    (
        "training.save_strategy",
        lambda v: v["training.save_strategy"] == "best" and v["training.metric_for_best_model"] is None,
        "needs training.metric_for_best_model, as in loss",
    ),
)


def conflicts(values: Values) -> list[Fault]:
    """Every conflict among ``values``; a key that is missing from them skips the checks that read it."""
    found: list[Fault] = []
    for key, other, cure in PAIRS:
        with suppress(KeyError):
            both = values[key] not in UNSET and values[other] not in UNSET
            found += [_fault(values, key, f"cannot go with {other}; {cure}")] if both else []
    for key, condition, what in CHECKS:
        with suppress(KeyError):
            found += [_fault(values, key, what)] if condition(values) else []
    for check in FUNCTIONS:
        with suppress(KeyError):
            found += check(values)
    return found


def _fault(values: Values, key: str, what: str) -> Fault:
    value = values.get(key, MISSING)
    return Fault(tuple(key.split(".")), MISSING if value is None else value, what)


def model_type(values: Values) -> Iterator[Fault]:
    config = values["model.config"]
    if config is not None and not (isinstance(config.get("model_type"), str) and config["model_type"]):
        key, value = ("model", "config", "model_type"), config.get("model_type", MISSING)
        lead = "missing; " if value is MISSING else ""
        yield Fault(key, value, f"{lead}must be the name of a Hugging Face architecture, as in llama")


def vocabulary(values: Values) -> Iterator[Fault]:
    tokenizer, config = values["model.tokenizer"], values["model.config"]
    size = config.get("vocab_size") if config else None
    if isinstance(tokenizer, dict) and type(size) is int and size < tokenizer["vocab_size"]:
        key = ("model", "tokenizer", "vocab_size")
        yield Fault(key, tokenizer["vocab_size"], f"must be <= model.config.vocab_size, which is {size}")


def one_source_of_eval_data(values: Values) -> Iterator[Fault]:
    for key in ("data.eval_path", "data.eval_split"):
        if values["data.eval_fraction"] and values[key] and not values["data.streaming"]:
            yield _fault(values, "data.eval_fraction", f"cannot go with {key}; {KEEP_ONE}")
            return


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
            yield _fault(values, new, f"is the newer name of {old}; {KEEP_ONE}")


def excluded_by_a_strategy(values: Values) -> Iterator[Fault]:
    for name in available():
        if name in values["strategies"]:
            for said, why in find(name).excludes.items():
                key, _, value = said.partition(" = ")
                if values.get(key) and value in ("", values[key]):
                    yield _fault(values, key, f"{why}; {KEEP_ONE}")


def half_weights_without_half_compute(values: Values) -> Iterator[Fault]:
    """A plan of single parameters in the dtype of compute takes that from ``training``: they must be loaded so, too."""
    if values["model.dtype"] == "float32" or values["training.bf16"] or values["training.fp16"]:
        return
    for name in available():
        if name in values["strategies"] and find(name).requires >= PLANNED:
            what = f"strategies.{name} computes in float32 without training.bf16; write training.bf16: true, or float32"
            yield _fault(values, "model.dtype", what)


FUNCTIONS: tuple[Callable[[Values], Iterator[Fault]], ...] = (
    model_type,
    vocabulary,
    one_source_of_eval_data,
    pydoc_completions,
    best_model,
    best_model_is_saved,
    warmup_beyond_end,
    loader_without_workers,
    one_name_for_recompute,
    excluded_by_a_strategy,
    half_weights_without_half_compute,
)
