"""Gradients of data parallelism, averaged in phases inside and across machines instead of by one ring.

Under torch's DistributedDataParallel that is its communication hook (``ddp_hook.py``). DeepSpeed's stage 0 leaves
gradients alone in ``no_sync``; they are averaged before they are clipped.

Invariant. As in both libraries gradients are divided by the number of ranks first and then added, in the order of
``strategies/engine/ranks/two_level.py``.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine.ranks import two_level
from deepstow.strategies.engine.ranks.two_level import TwoLevel
from deepstow.strategies.parallel.pipeline_gradients import messages
from deepstow.strategies.plugins.ddp_hook import Hook


def exchange_of(plan: Plan) -> TwoLevel | None:
    """What data parallelism exchanges by, where the plan says so and the memory engine does not do it. A collective."""
    return two_level.exchange_of(plan, dist.group.WORLD) if plan.facts.run.two_level and plan.layout is None else None


def averages(exchange: TwoLevel, flat: Tensor) -> Tensor:
    """``flat`` becomes the mean over the ranks."""
    flat.div_(exchange.ranks)
    exchange.all_reduce(flat, flat.new_empty(exchange.room(flat.numel())))
    return flat


def hook_of(exchange: TwoLevel) -> Hook:
    """What gives DistributedDataParallel such means."""
    return Hook(lambda bucket: averages(exchange, bucket.buffer()))


@torch.no_grad()
def average_gradients(exchange: TwoLevel, parameters: Iterable[nn.Parameter]) -> None:
    """Gradients of all that train become their means; where a rank has none it counts as zeros."""
    params = [param for param in parameters if param.requires_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    for message in messages([param.grad for param in params if param.grad is not None]):
        flat = averages(exchange, _flatten_dense_tensors(message))
        torch._foreach_copy_(message, list(_unflatten_dense_tensors(flat, message)))
