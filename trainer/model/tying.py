"""Weights that a model's config ties, and of which its files hold values of their own.

Transformers does not tie such weights: it loads both, and trains both. So whoever counts, loads or exports the model
has to know them before any weight is loaded. They are found by the names in the files; values are read only of a pair
that the files have twice, a few rows at a time, until two differ. Equal values are tied, as Transformers ties them.

Where the key ``tie_word_embeddings`` is about these weights alone it becomes false, and the export says so. T5 and its
like have that key for all three of their tables; their export has the weight as well, and is loaded as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model.saved_tensors import renamed, rows_in_files
from deepstow.trainer.tasks.task import loaded

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from deepstow.trainer.tasks.task import Task

KEY = "tie_word_embeddings"
PIECE_ROWS = 4096


def untied(model: PreTrainedModel, name_or_path: str | None) -> tuple[str, ...]:
    """Names of weights that ``model``, which needs no values, ties, and the files of the saved model do not."""
    pairs = getattr(model, "all_tied_weights_keys", None)
    if name_or_path is None or not pairs:
        return ()
    rows = rows_in_files(name_or_path)
    saved = {name: rows[key] for key, name, pattern in renamed(model, rows) if pattern is None}
    return tuple(
        name
        for name, source in pairs.items()
        if name in saved and source in saved and not _equal(saved[name], saved[source], model.get_parameter(name).dtype)
    )


def untie(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Give weights of a ``model`` without values tensors of their own, and tie all others that are to be tied."""
    any_model: Any = model
    any_model.untied = tuple(names)
    for name in any_model.untied:
        path, _, key = name.rpartition(".")
        param: Any = model.get_parameter(name)
        model.get_submodule(path).register_parameter(key, nn.Parameter(torch.empty_like(param), param.requires_grad))
        model.all_tied_weights_keys.pop(name, None)
    model.tie_weights(recompute_mapping=False)


def config_says(config: PretrainedConfig, task: Task, names: Iterable[str]) -> bool:
    """Whether ``config`` ties ``names`` and nothing else, so that it can say that they are not."""
    mapping = loaded(task.model_class)._model_mapping
    kind: Any = mapping.get(type(config), None)  # None: the model brings its own code
    if kind is None or set(kind._tied_weights_keys or ()) != set(names):
        return False
    return KEY not in inspect.getsource(kind.forward)


def check(model: PreTrainedModel, name_or_path: str | None, planned: Collection[str]) -> None:
    """Raise ConfigError if ``model``, as it was loaded, is not tied as ``planned``: its files came after the plan."""
    by_config = model.get_expanded_tied_weights_keys(all_submodels=True)
    untied_names = {*by_config} - {*model.all_tied_weights_keys} | {*untied(model, name_or_path)}
    if unplanned := sorted(untied_names - {*planned}):
        raise ConfigError(
            f"model.name_or_path = {name_or_path!r}: its files, which were not here when it was planned, have "
            f"{unplanned[0]} of their own, which its config ties; start once more"
        )


def _equal(one: Callable[[slice], Tensor], other: Callable[[slice], Tensor], dtype: torch.dtype) -> bool:
    """Whether they are equal in the model's dtype, in which Transformers compares them."""
    at = 0
    while True:
        rows = slice(at, at + PIECE_ROWS)
        first, second = one(rows).to(dtype), other(rows).to(dtype)
        if not torch.equal(first, second):
            return False
        if len(first) < PIECE_ROWS:
            return True
        at += PIECE_ROWS
