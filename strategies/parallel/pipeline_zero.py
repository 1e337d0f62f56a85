"""ZeRO 1 among the copies of a pipeline's stage: each keeps the optimizer's state of a part of every weight.

Ranks of the same stage have the same weights and, once they are complete and clipped, the same gradients. Each updates
its part, consecutive elements of each weight, and all gather what the others have updated. The optimizer is torch's and
is given views: before a step of the part's weights and gradients, so that it makes state for them alone.

Invariant. Weights and state have the bits of copies that each update all: what an element becomes depends on its own
weight, gradient and state. Torch's CPU kernels round the last elements of a call, fewer than a vector, otherwise than
others, so weights are cut at multiples of a vector. Refused by ``strategies/pipeline.py``: optimizers of which that
is not so, and Adagrad, which makes its state before there are parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstow.strategies.parallel.pipeline_gradients import messages
from deepstow.strategies.parallel.tensor_shards import whole_shape, within
from deepstow.strategies.state.torch_state import Held, Piece

VECTOR = 64  # elements; no kernel takes more at a time


class StateShares:
    """This rank's parts of what ``optimizer`` updates, which is changed to update those alone. ``copies``: the ranks
    with the same stage.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: dist.ProcessGroup) -> None:
        self._group, self._shards, self._place = copies, dist.get_world_size(copies), dist.get_rank(copies)
        self.groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if len(mine := self._of(param, self._place)):
                    self._parts[param] = nn.Parameter(param.detach().view(-1)[mine.start : mine.stop])
            group["params"] = [self._parts[param] for param in group["params"] if param in self._parts]
        optimizer.register_step_pre_hook(self._give)
        optimizer.register_step_post_hook(self._gather)

    def _of(self, param: Tensor, place: int) -> range:
        """The elements of ``param`` that the rank at ``place`` updates."""
        size = -(-param.numel() // (self._shards * VECTOR)) * VECTOR
        return range(param.numel())[place * size : (place + 1) * size]

    def _give(self, *about: Any) -> None:
        for param, part in self._parts.items():
            mine = self._of(param, self._place)
            part.data = param.detach().view(-1)[mine.start : mine.stop]
            part.grad = None if param.grad is None else param.grad.reshape(-1)[mine.start : mine.stop]

    def _gather(self, *about: Any) -> None:
        """Every copy gets all parts; a collective."""
        for part in self._parts.values():
            part.grad = None
        for message in messages([param.detach() for group in self.groups for param in group]):
            self._exchange(message)

    def _exchange(self, params: Sequence[Tensor]) -> None:
        sizes = [len(self._of(param, 0)) for param in params]
        mine = torch.zeros(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        for in_message, in_weight in self._places(params, sizes, mine, self._place):
            in_message.copy_(in_weight)
        everyones = mine.new_empty(self._shards * len(mine))
        dist.all_gather_into_tensor(everyones, mine, group=self._group)
        for place, theirs in enumerate(everyones.chunk(self._shards)):
            for in_message, in_weight in self._places(params, sizes, theirs, place):
                in_weight.copy_(in_message)

    def _places(
        self, params: Sequence[Tensor], sizes: Sequence[int], message: Tensor, place: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each weight the part at ``place``, in the ``message`` and where it belongs."""
        places = []
        for param, in_message in zip(params, message.split(list(sizes)), strict=True):
            elements = self._of(param, place)
            places.append((in_message[: len(elements)], param.view(-1)[elements.start : elements.stop]))
        return places

    def held(self, param: nn.Parameter, name: str, *, written: bool) -> list[Held]:
        """This rank's part of the weight ``name`` as the optimizer has it; none of a weight that is too small."""
        if param not in self._parts:
            return []
        elements = self._of(param, self._place)
        start, columns = within(param, elements.start)
        piece = Piece(name, whole_shape(param), start, 0, len(elements), columns, written)
        return [Held(self._parts[param], (piece,), str(param.dtype).removeprefix("torch."))]
