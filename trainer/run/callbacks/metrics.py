"""Metrics of one's own: ``training.compute_metrics: module:function``, with the signature of Hugging Face's Trainer.

The function gets an ``EvalPrediction`` and returns numbers by name. A language model has a logit for each word at each
position, too much to keep of all rows, so a second function, ``preprocess_logits_for_metrics``, says what is kept.

Invariant. Both get what Hugging Face's Trainer gives them. Each batch keeps the task's own part and theirs, so what an
evaluation says without them it says with them, to the last bit; a number of the same name as one of the task's, as
accuracy, takes its place, but for the loss and what follows from it.

Refused: functions that cannot be found, before data is read; a result that is not numbers by name, or has a name that
is taken. What a function itself raises ends the run with its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from deepstow.trainer.registry import Unusable, named

if TYPE_CHECKING:
    from transformers import EvalPrediction

    from deepstow.trainer.config.sections import RunConfig

KEYS = ("compute_metrics", "preprocess_logits_for_metrics")
TAKEN = ("loss", "tokens", "perplexity", "runtime", "per_second")  # ends of names


def refuse(config: RunConfig) -> None:
    """Raise ConfigError if a function is not where the config says."""
    for key in KEYS:
        found(config, key)


def found(config: RunConfig, key: str) -> Callable[..., Any] | None:
    """The function that a key of ``training`` names; None if it names none. May raise ConfigError."""
    reference: str | None = getattr(config.training, key)
    if reference is None:
        return None
    try:
        work = named(reference, config.folders(f"training.{key}"))
    except Unusable as error:
        raise config.error(f"training.{key}", reference, str(error)) from None
    if not callable(work):
        raise config.error(f"training.{key}", reference, f"{reference.partition(':')[2]} is no function")
    return work  # type: ignore[no-any-return]


def beside(arguments: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """A Trainer's keyword arguments, with the functions of the config beside the task's own ``arguments``."""
    user_measure, keeps = (found(config, key) for key in KEYS)
    if user_measure is None:
        return arguments
    measure, keep = (arguments.get(key) for key in KEYS)

    def preprocess(logits: Any, labels: Any) -> tuple[Any, Any]:
        return tuple(work(logits, labels) if work else logits for work in (keep, keeps))  # type: ignore[return-value]

    def compute(prediction: EvalPrediction) -> dict[str, Any]:
        for_task, for_user = (type(prediction)(part, prediction.label_ids) for part in prediction.predictions)
        numbers: dict[str, Any] = measure(for_task) if measure else {}
        return {**numbers, **checked(user_measure(for_user), config)}

    return {**arguments, **dict(zip(KEYS, (compute, preprocess), strict=True))}


def checked(result: Any, config: RunConfig) -> Mapping[str, Any]:
    """The result of the user's function, if it is numbers under names of their own. May raise ConfigError."""
    names = result if isinstance(result, Mapping) else {"": result}
    what = None
    if wrong := [name for name, value in names.items() if not (name and isinstance(name, str) and _is_number(value))]:
        what = f"must return numbers by name, and {wrong[0] or 'the result'} is {type(names[wrong[0]]).__name__}"
    elif wrong := [name for name in names if name.endswith(TAKEN)]:
        what = f"returns {wrong[0]!r}, and names that end in {', '.join(TAKEN)} are taken; give it another"
    if what is not None:
        raise config.error("training.compute_metrics", config.training.compute_metrics, what)
    return names


def _is_number(value: Any) -> bool:
    """Whether records can have it: Hugging Face's Trainer makes numbers of NumPy's, and of tensors with one element."""
    return isinstance(value, (int, float, np.number, np.bool_)) or (isinstance(value, Tensor) and value.numel() == 1)
