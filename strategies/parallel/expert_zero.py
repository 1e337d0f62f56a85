"""What DeepSpeed's ZeRO 1 and 2 have to know of experts that are divided over ranks.

Everything but experts is shared by all ranks, experts by those that have the same ones. DeepSpeed finds such layers by
its own class (``deepspeed.moe.layer.MoE``), asks them to make process groups, and takes their weights in parameter
groups that are marked ``moe``. So layers get that class besides Hugging Face's, whose forward stays. DeepSpeed adds
gradients over the ranks with the same experts, divides by the number of all ranks, and adds up norms of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepstow.strategies.parallel.tensor_shards import shard_of


def mark(layers: Iterable[nn.Module], params: Iterable[nn.Parameter], degree: int) -> None:
    """Tell DeepSpeed that ``degree`` ranks have all experts of ``layers`` together."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class Divided(MoE):
        """Experts of Hugging Face's in the eyes of DeepSpeed."""

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            groups._create_expert_and_data_parallel(degree)

    for layer in layers:
        layer.__class__ = type(type(layer).__name__, (type(layer), Divided), {})
    param: Any
    for param in params:
        param.allreduce = False
        param.group_name = f"ep_size_{degree}"


def divide_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give the experts of each parameter group a group of their own."""
    for group in list(optimizer.param_groups):
        experts = [param for param in group["params"] if shard_of(param) is not None]
        if experts:
            group["params"] = [param for param in group["params"] if shard_of(param) is None]
            marked: Mapping[str, Any] = {"params": experts, "moe": True, "name": experts[0].group_name}
            optimizer.add_param_group({**group, **marked})
