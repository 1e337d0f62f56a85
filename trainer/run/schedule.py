"""The course of the learning rate, tried before anything is prepared: its options are Transformers' to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import first_line

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
KEY = "training.lr_scheduler_kwargs"


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for options that the scheduler does not take, or without which it cannot be made."""
    import torch
    from transformers import get_scheduler

    args = config.training
    kind, given = args.lr_scheduler_type or "linear", args.lr_scheduler_kwargs
    if given and kind in WITHOUT_OPTIONS:
        raise config.error(KEY, given, f"lr_scheduler_type {kind} takes no options; leave it out")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    steps = args.max_steps if args.max_steps > 0 else 1_000_000
    try:  # no warm-up, so that the first rate is already one of the course
        get_scheduler(kind, optimizer, 0, steps, dict(given or {}))
    except Exception as error:  # options can be wrong in any way
        raise config.error(KEY, given, f"lr_scheduler_type {kind}: {first_line(error)}") from None
