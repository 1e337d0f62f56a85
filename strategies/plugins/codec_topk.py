"""The largest elements of each gradient, and what is owed of the others: top-k with error feedback.

Each rank adds its gradient to what it owes, sends the elements that are largest then, and owes the rest from now on
(u = g + e; send C(u); e = u - C(u)). Every rank gets all messages and adds them in the order of ranks, so ranks have
the same bits, which depend on no bucket: elements are chosen of each parameter by itself. A gradient of zeros, as of a
parameter that this rank did not use, sends nothing, and what is owed waits. NaN and infinity count as the largest, so
they reach all ranks.

Momentum correction (Lin et al., Deep Gradient Compression, 2018), for an optimizer that is momentum alone: each rank
keeps the momentum of its own gradients, u = m u + g, owes that instead of g, and forgets it where an element was sent,
since its direction is an old one (their momentum factor masking). The optimizer is plain SGD then. While all is sent
the mean is momentum's of the mean, u = m u + mean(g), on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class TopK:
    """``density``: the part of a gradient's elements that is sent, at least one of each parameter. ``group``: of the
    ranks that exchange. ``momentum``: 0 without correction.
    """

    def __init__(
        self, sizes: Iterable[tuple[str, Tensor]], density: float, momentum: float, group: dist.ProcessGroup
    ) -> None:
        """``sizes``: the trained parameters by name."""
        self._density = density
        self._momentum = momentum
        self._group = group
        kinds = ("owed", "momentum") if momentum else ("owed",)
        self.state = {
            f"{name}.{kind}": torch.zeros_like(like, dtype=torch.float32).view(-1)
            for name, like in sizes
            for kind in kinds
        }

    def follow(self, names: Sequence[str], means: Sequence[Tensor]) -> None:
        """Means of all that ranks have become their momentum; only with correction."""
        for name, mean in zip(names, means, strict=True):
            mean.copy_(self.state[f"{name}.momentum"].mul_(self._momentum).add_(mean.reshape(-1)).view_as(mean))

    def exchange(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Gradients become their means over the ranks, as far as they were sent."""
        ranks = self._group.size()
        sent = [self._chosen(name, grad) for name, grad in zip(names, gradients, strict=True)]
        counts = [index.numel() for index, _ in sent]
        message = torch.cat([tensor for index, value in sent for tensor in (index.int(), value.view(torch.int32))])
        received = message.new_empty(ranks * message.numel())
        dist.all_gather_into_tensor(received, message, group=self._group)
        sizes = [count for count in counts for _ in range(2)]
        by_rank = [message_of_rank.split(sizes) for message_of_rank in received.view(ranks, -1)]
        for number, grad in enumerate(gradients):
            total = torch.zeros(grad.numel(), device=grad.device)
            for parts in by_rank:
                total.index_add_(0, parts[2 * number], parts[2 * number + 1].view(torch.float32))
            grad.copy_(total.div_(ranks).view_as(grad))

    def _chosen(self, name: str, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Places and values of what is sent of one gradient; the rest is owed. Places never repeat."""
        owed = self.state[f"{name}.owed"]
        due = grad.reshape(-1)
        has = grad.any()
        if self._momentum:
            momentum = self.state[f"{name}.momentum"]
            due = momentum.mul_(torch.where(has, self._momentum, 1.0)).add_(due) * has
        owed.add_(due)
        index = owed.abs().topk(math.ceil(self._density * owed.numel()), sorted=False).indices
        value = owed[index] * has
        owed[index] -= value
        if self._momentum:
            momentum[index] *= ~has
        return index, value
