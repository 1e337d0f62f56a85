"""The largest elements of each gradient, and what is owed of the others: top-k with error feedback.

Each rank adds its gradient to what it owes, sends the elements that are largest then, and owes the rest from now on
(u = g + e; send C(u); e = u - C(u)). Every rank gets all messages and adds them in the order of ranks, so ranks have
the same bits, which depend on no bucket: elements are chosen of each parameter by itself. A gradient of zeros, as of a
parameter that this rank did not use, sends nothing, and what is owed waits. NaN and infinity count as the largest, so
they reach all ranks.

Momentum correction (Lin et al., Deep Gradient Compression) belongs to an optimizer that is momentum alone; the ones
here are mostly Adam's, and ``start`` stands for its warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class TopK:
    """``density``: the part of a gradient's elements that is sent, at least one of each parameter. ``group``: of the
    ranks that exchange.
    """

    def __init__(self, sizes: Iterable[tuple[str, Tensor]], density: float, group: dist.ProcessGroup) -> None:
        """``sizes``: the trained parameters by name."""
        self._density, self._group = density, group
        self.state = {f"{name}.owed": torch.zeros_like(like, dtype=torch.float32).view(-1) for name, like in sizes}

    def exchange(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Gradients become their means over the ranks, as far as they were sent."""
        ranks = self._group.size()
        sent = [self._chosen(self.state[f"{name}.owed"], grad) for name, grad in zip(names, gradients, strict=True)]
        counts = [index.numel() for index, _ in sent]
        message = torch.cat([part for index, value in sent for part in (index.int(), value.view(torch.int32))])
        received = message.new_empty(ranks * message.numel())
        dist.all_gather_into_tensor(received, message, group=self._group)
        sizes = [count for count in counts for _ in range(2)]
        by_rank = [each.split(sizes) for each in received.view(ranks, -1)]
        for number, grad in enumerate(gradients):
            total = torch.zeros(grad.numel(), device=grad.device)
            for parts in by_rank:
                total.index_add_(0, parts[2 * number], parts[2 * number + 1].view(torch.float32))
            grad.copy_(total.div_(ranks).view_as(grad))

    def _chosen(self, owed: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Places and values of what is sent of one gradient; the rest is owed. Places never repeat."""
        owed.add_(grad.reshape(-1))
        index = owed.abs().topk(math.ceil(self._density * owed.numel()), sorted=False).indices
        value = owed[index] * grad.any()
        owed[index] -= value
        return index, value
