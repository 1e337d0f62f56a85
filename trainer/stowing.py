"""From a config to the memory engine: the update rule, the dtype of the weights, and who builds the optimizer.

Parameters are grouped as Hugging Face's Trainer does it, with weight decay and without; the plan was made with the same
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from strategies.core.facts import Precision
from strategies.core.plan import Plan
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from strategies.runtime import Rule, StowOptimizer
    from trainer.config.arguments import TrainingSection

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


def refuse_optimizer(training: TrainingSection) -> None:
    """Nothing, if the engine can update as ``training.optim`` says.

    Raises:
        ConfigError: it cannot.
    """
    if training.optim not in OPTIMIZERS:
        raise ConfigError(
            f"training.optim = {training.optim!r}: strategies.offload updates with one of {', '.join(OPTIMIZERS)}"
        )


def rule_of(arguments: TrainingArguments) -> Rule:
    """The update rule and its hyperparameters, as Hugging Face sets them."""
    from strategies.runtime import SGD, AdamW

    if arguments.optim == "sgd":
        return SGD(lr=arguments.learning_rate)
    return AdamW(
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=arguments.optim == "adamw_torch_fused",
    )


def to_compute_dtype(model: nn.Module, plan: Plan) -> None:
    """Round the weights to what the plan computes with, one by one; the engine keeps masters in fp32."""
    import torch

    if plan.facts.run.precision is Precision.BF16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def maker(plan: Plan, arguments: TrainingArguments) -> Callable[[nn.Module, Collection[str]], StowOptimizer]:
    """Makes the optimizer of a model, given the names of its parameters that decay."""

    def make(model: nn.Module, decaying: Collection[str]) -> StowOptimizer:
        import torch.distributed as dist

        from strategies.runtime import stow

        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [param for name, param in trained if name in decaying], "weight_decay": arguments.weight_decay},
            {"params": [param for name, param in trained if name not in decaying], "weight_decay": 0.0},
        ]
        ranks = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        return stow(model, plan, groups, rule_of(arguments), process_group=ranks)

    return make
