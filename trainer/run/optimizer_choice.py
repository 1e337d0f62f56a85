"""From Hugging Face's optimizer to the memory engine's: update rule, parameter groups, dtype of the weights.

A Trainer's arguments, a subclass or the user decide how parameters are grouped and with which hyperparameters they are
updated. Torch's optimizers have no state before their first step, so the Trainer makes one as usual, and its groups and
hyperparameters are taken over.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from strategies.core.facts import Precision
from strategies.core.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strategies.engine import UpdateRule
    from trainer.config.sections import RunConfig

# Options that the engine's update rules do not have; ``None`` and these values are accepted.
PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False, "momentum": 0, "dampening": 0, "nesterov": False}


def refuse_under_zero(config: RunConfig, stage: int | None) -> None:
    """Raise ConfigError for a schedule that DeepSpeed's optimizer, which replaces torch's, would not follow: it does
    not know the first rate, which ``min_lr`` is a part of.
    """
    training = config.training
    lowest = (training.lr_scheduler_kwargs or {}).get("min_lr")
    if stage and lowest is not None:
        rate = f"{lowest / training.learning_rate:.6g}"
        cure = (
            f"not with strategies.zero.stage {stage}, whose optimizer does not know the first rate; write "
            f"min_lr_rate: {rate}"
        )
        raise config.error("training.lr_scheduler_kwargs.min_lr", lowest, cure)


def adopt(optimizer: torch.optim.Optimizer) -> tuple[UpdateRule, list[dict[str, Any]]]:
    """The update rule and the parameter groups of a torch optimizer that has not been used yet.

    The groups are the same objects, so a scheduler that was made for the optimizer still sets their learning rates.

    Raises:
        ValueError: the engine has no such rule, or the optimizer has state or hooks.
    """
    import torch

    from strategies.engine import SGD, AdamW

    kind, defaults = type(optimizer), optimizer.defaults
    rules: dict[type, Any] = {torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}
    if kind not in rules:
        raise ValueError(
            f"a stowed trainer updates with torch.optim.AdamW or torch.optim.SGD, not with {kind.__name__}: write "
            f"optim='adamw_torch_fused', or pass no other optimizer"
        )
    for group in optimizer.param_groups:
        for name, plain in PLAIN.items():
            if group.get(name, plain) not in (plain, None):
                raise ValueError(f"a stowed trainer has no {kind.__name__} with {name}={group[name]}: leave it out")
    if optimizer.state:
        raise ValueError("this optimizer has state already: pass a stowed trainer a new one")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError("this optimizer has step hooks, which a stowed trainer would not call: use a TrainerCallback")
    fused = {} if kind is torch.optim.SGD else {"fused": bool(defaults.get("fused"))}
    names = {field.name for field in dataclasses.fields(rules[kind])} - {"fused"}
    rule: UpdateRule = rules[kind](**{name: defaults[name] for name in names}, **fused)
    return rule, optimizer.param_groups


def to_compute_dtype(model: nn.Module, plan: Plan) -> None:
    """Cast the weights to bf16, one by one, if the plan computes in it; the engine keeps fp32 masters."""
    import torch

    if plan.facts.run.precision is Precision.BF16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
