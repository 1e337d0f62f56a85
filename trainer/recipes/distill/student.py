"""A model that learns from a teacher's answers: what is compared, how rows carry it, and the loss that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.recipes.distill import TEACHER, asked_of
from deepstow.trainer.recipes.distill.loss import Distillation, distil

if TYPE_CHECKING:
    from torch import nn

    from deepstow.trainer.config.sections import RunConfig


def width_of(text_config: Any) -> int:
    """Numbers of the hidden state that the head of a language model reads; a small OPT projects its states first."""
    return getattr(text_config, "word_embed_proj_dim", None) or int(text_config.hidden_size)


def comparison(config: RunConfig, words: int, hidden: int) -> Distillation:
    """What ``config`` compares of ``words`` words and ``hidden`` numbers of a state that student and teacher have."""
    section = asked_of(config)
    few = section.top_k if section.top_k != "all" and section.top_k < words else None
    half = config.training.bf16 and hidden % 2 == 0  # two of them are kept in 32 bits
    return Distillation(
        section.loss,
        section.alpha,
        section.temperature,
        few,
        words,
        0 if section.on == "logits" else hidden,
        section.hidden_weight,
        half,
        section.on != "hidden",
    )


def learn(model: nn.Module, config: RunConfig, how: Distillation) -> None:
    """Give ``model`` the loss of a student. ConfigError if it has one of its own."""
    try:
        distil(model, how)
    except ValueError as error:
        raise config.error("distill.teacher", asked_of(config).teacher, f"{error}; leave distill out") from None


def counted(model: Any, config: RunConfig, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Give ``model`` the loss of a student. Returns what forward is given of a teacher, taken to have as many words, of
    rows and tokens of this ``shape``.
    """
    text = model.config.get_text_config()
    how = comparison(config, text.vocab_size, width_of(text))
    learn(model, config, how)
    return {TEACHER: torch.zeros(*shape, how.width, dtype=torch.int32)}


def answers_of(rows: Sequence[Mapping[str, Any]], labels: Tensor) -> Tensor:
    """The teacher's answers at every position, int32 [rows, length, width]; 0 where the next token is not trained. Rows
    have them as bytes, those at positions whose next token is trained, in order.
    """
    predicts = pad(labels, (0, 1), value=MASKED)[:, 1:] != MASKED
    stored = np.frombuffer(b"".join(row[TEACHER] for row in rows), np.int32)
    found = torch.zeros(*labels.shape, len(stored) // int(predicts.sum()), dtype=torch.int32)
    found[predicts] = torch.from_numpy(stored.copy()).view(int(predicts.sum()), -1)
    return found
