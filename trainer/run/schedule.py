"""The course of the learning rate, tried before anything is prepared: its options are Transformers' to know."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

from deepstow.trainer.errors import first_line

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
KEY = "training.lr_scheduler_kwargs"


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for options that the scheduler does not take, without which it cannot be made, or that give a
    rate that is negative or no number where the course begins, in its middle or where it ends.
    """
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import get_scheduler

    args = config.training
    kind, given = args.lr_scheduler_type or "linear", args.lr_scheduler_kwargs
    if given and kind in WITHOUT_OPTIONS:
        raise config.error(KEY, given, f"lr_scheduler_type {kind} takes no options; leave it out")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    steps = args.max_steps if args.max_steps > 0 else 1_000_000
    share = args.warmup_steps or 0
    warm_up = ceil(share * steps) if share < 1 else int(share)
    at, said = 0, ""
    try:
        made = get_scheduler(kind, optimizer, warm_up, steps, dict(given or {}))
        for at in (warm_up, (warm_up + steps) // 2, steps - 1, steps) if isinstance(made, LambdaLR) else ():
            part = made.lr_lambdas[0](at)
            if isinstance(part, complex) or not 0 <= part < inf:
                said = f"the learning rate would be {part} of training.learning_rate"
                break
    except Exception as error:  # options can be wrong in any way
        said = first_line(error)
    if said:
        raise config.error(KEY, given, f"lr_scheduler_type {kind}: {said}{f' at step {at}' * (at > 0)}")
