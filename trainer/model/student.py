"""A model that learns from a teacher's answers: what is compared, and the loss that does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepstow.trainer.model.distilled_loss import TEACHER, Distillation, distil

__all__ = ["TEACHER", "comparison", "learn", "width_of"]

if TYPE_CHECKING:
    from torch import nn

    from deepstow.trainer.config.sections import RunConfig


def width_of(text_config: Any) -> int:
    """Numbers of the hidden state that the head of a language model reads; a small OPT projects its states first."""
    return getattr(text_config, "word_embed_proj_dim", None) or int(text_config.hidden_size)


def comparison(config: RunConfig, words: int, hidden: int) -> Distillation:
    """What ``config`` compares of ``words`` words and ``hidden`` numbers of a state that student and teacher have."""
    section: Any = config.distill
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
        assert config.distill is not None
        raise config.error("distill.teacher", config.distill.teacher, f"{error}; leave distill out") from None
