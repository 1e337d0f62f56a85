"""Gradients in 8 bits by blocks, with error feedback on both sides.

Quantised numbers cannot be added on their way, so each rank owns a part of every parameter: gradients go to the owners
in 8 bits, who add them in fp32 in the order of ranks, and send the means to all in 8 bits again. Both roundings are
owed: by the rank that sent, and by the owner (u = g + e; send C(u); e = u - C(u)). All ranks decode the same bytes, so
they have the same bits, which depend on no bucket: parts and blocks are those of each parameter by itself.

A block is ``BLOCK`` numbers and one scale in fp32, its largest number over 127; no number is off by more than half of
it. A number that is not finite makes the whole block so, on all ranks. Where no rank has a gradient nothing is sent,
and what is owed waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128


def encoded(numbers: Tensor) -> Tensor:
    """Bytes of blocks: (..., BLOCK) in fp32 become (..., 4 + BLOCK)."""
    scale = numbers.abs().amax(-1, keepdim=True) / 127
    levels = (numbers / scale.where(scale != 0, 1)).round().to(torch.int8)
    return torch.cat([scale.view(torch.uint8), levels.view(torch.uint8)], -1)


def decoded(coded: Tensor) -> Tensor:
    """The numbers, in fp32."""
    return coded[..., 4:].view(torch.int8) * coded[..., :4].contiguous().view(torch.float32)


class Int8:
    """``group``: of the ranks that exchange."""

    _encoded, _decoded = staticmethod(encoded), staticmethod(decoded)

    def __init__(self, sizes: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
        """``sizes``: the trained parameters by name."""
        self._group, self.state = group, dict[str, Tensor]()
        for name, like in sizes:
            blocks = -(-like.numel() // (BLOCK * group.size()))  # of each rank's part
            self.state[f"{name}.owed"] = torch.zeros_like(like, dtype=torch.float32).view(-1)
            self.state[f"{name}.owed as owner"] = torch.zeros(blocks, BLOCK, device=like.device)

    def exchange(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Gradients become their means over the ranks, rounded twice."""
        ranks = self._group.size()
        owned = [self.state[f"{name}.owed as owner"] for name in names]
        blocks = [owed.shape[0] for owed in owned]
        mine = torch.cat([self._sent(name, grad) for name, grad in zip(names, gradients, strict=True)], 1)
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=self._group)
        mean = torch.zeros(sum(blocks), BLOCK, device=mine.device)
        for rows in received:  # one rank's after the other
            mean += self._decoded(rows)
        mean.div_(ranks)
        for rows, grad in zip(mean.split(blocks), gradients, strict=True):  # beyond the end there is nothing
            rows.view(-1)[max(0, grad.numel() - self._group.rank() * rows.numel()) :] = 0
        due = torch.cat(owned).add_(mean)
        coded = self._encoded(due * (mean != 0).any(-1, keepdim=True))
        torch._foreach_copy_(owned, due.sub_(self._decoded(coded)).split(blocks))
        gathered = torch.empty_like(mine).flatten(0, 1)
        dist.all_gather_into_tensor(gathered, coded, group=self._group)
        for grad, rows in zip(gradients, gathered.view_as(mine).split(blocks, 1), strict=True):
            grad.copy_(self._decoded(rows).view(-1)[: grad.numel()].view_as(grad))

    def _sent(self, name: str, grad: Tensor) -> Tensor:
        """A gradient, with what is owed, in bytes: (ranks, blocks of each, 4 + BLOCK)."""
        owed, blocks = self.state[f"{name}.owed"], self.state[f"{name}.owed as owner"].shape[0]
        owed.add_(grad.reshape(-1))
        ranks = self._group.size()
        padded = pad(owed * grad.any(), (0, ranks * blocks * BLOCK - owed.numel()))
        coded = self._encoded(padded.view(ranks, blocks, BLOCK))
        owed -= self._decoded(coded).view(-1)[: owed.numel()]
        return coded
