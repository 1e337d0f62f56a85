"""Whether a run on other ranks makes every update of the same rows, in the same order, as the run that saved.

An update is made of ``gradient_accumulation_steps`` micro-batches on each copy of the model. Copies take turns in one
order of rows, so N copies with A micro-batches each are given the rows of one copy with N x A, if micro-batches are of
the same size. The gradient is then the same sum, with the same bits for one or two micro-batches; of more the order of
additions depends on the strategy, which is said in docs/exactness.md.

Not so, and therefore refused: rows that do not divide evenly at the end of an epoch, where Accelerate fills the last
round of N copies with rows from the beginning; samplers that look at N or A; dropout, of which each rank draws its own;
losses that are means over one rank's tokens, or compare rows across ranks (kto); schedules that follow
evaluations, whose batches are others; streams, and data that was allowed to change, whose number of rows is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

ACCUMULATION, RANKS = "training.gradient_accumulation_steps", "ranks"
RANDOM = ("drop", "jitter", "noise")  # in keys of Hugging Face's model configs
IN_ORDER = ("random", "sequential")
FOLLOWS_LOSS = ("reduce_lr_on_plateau", "greedy")  # schedules


class Known(NamedTuple):
    """Of the checkpoint: rows of an epoch (None: not known), Hugging Face's config of the model, and which hashes of
    contents it ``lacks``.
    """

    rows: int | None = None
    model: Mapping[str, Any] = {}
    lacks: Collection[str] = ()


NOT_KNOWN = Known()


def micro_batches(tree: Mapping[str, Any], copies: int) -> int:
    """Of one update, in the run of the config ``tree``."""
    return int(tree.get("training", {}).get("gradient_accumulation_steps") or 1) * copies


def why_not(saved: Mapping[str, Any], now: Mapping[str, Any], copies: tuple[int, int], known: Known) -> str:
    """Why updates of two runs on so many ``copies`` of the model have other rows, or may; empty if they do not."""
    trees = (saved.get("training", {}), now.get("training", {}))
    size, other_size = (int(tree.get("per_device_train_batch_size") or 8) for tree in trees)
    count = micro_batches(saved, copies[0])
    if size != other_size or micro_batches(now, copies[1]) != count:
        cure = f"; {ACCUMULATION} = {count // copies[1]} would keep them" if size == other_size else ""
        return f"an update has other rows{cure if count % copies[1] == 0 else ''}"
    for tree in trees:
        if tree.get("average_tokens_across_devices") is False:
            return "training.average_tokens_across_devices = false takes means over each rank's own tokens"
        if (order := tree.get("train_sampling_strategy") or IN_ORDER[0]) not in IN_ORDER:
            return f"training.train_sampling_strategy = {order} gives each number of ranks another order"
        if (schedule := tree.get("lr_scheduler_type")) in FOLLOWS_LOSS:
            return (
                f"training.lr_scheduler_type = {schedule} follows evaluations, whose batches are others on other ranks"
            )
    if now.get("task") == "kto":
        return "kto compares rows across ranks"
    if drawn := next(_random(saved, known.model), None):
        return f"{drawn} draws other numbers on other ranks"
    if known.rows is None:
        return "how many rows an epoch has is not known"
    steps = int(trees[1].get("max_steps") or -1)
    in_one_epoch = 0 < steps * count * size <= known.rows
    if not in_one_epoch and any(known.rows % (size * number) for number in copies):
        return f"{known.rows} rows do not divide evenly among them at the end of an epoch"
    return ""


def _random(saved: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """What draws random numbers in forward."""
    lora, training = saved.get("model", {}).get("lora") or {}, saved.get("training", {})
    of_config = {"lora_dropout": lora.get("lora_dropout"), "neftune_noise_alpha": training.get("neftune_noise_alpha")}
    for key, value in (*of_config.items(), *model.items()):
        if isinstance(value, Mapping):
            yield from _random({}, value)
        elif isinstance(value, (int, float)) and value > 0 and any(word in key for word in RANDOM):
            yield f"{key} = {value}"
