"""The memory engine over layers that are divided over ranks: what it is told of them, and where its state belongs.

Each rank stows its part of the model as any model. Ranks of one copy clip by the norm of all parts, and so skip the
same steps; gradients are averaged over the copies. What the ranks of a copy have whole is written by the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, device, nn

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.engine.saving.state_file import EngineState
from deepstow.strategies.engine.updating.norms import norm_of_all
from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.state.blocks import Columns
from deepstow.strategies.state.saved_state import Described
from deepstow.strategies.state.spans import Span
from deepstow.strategies.state.torch_state import Piece, spans_of


def among_ranks(model: nn.Module, grid: Grid) -> dict[str, Any]:
    """What ``stow`` is told about the other ranks; a collective."""
    copies, _ = dist.new_subgroups_by_enumeration(grid.groups("replica"))
    parts = {name for name, param in model.named_parameters() if tensor_shards.shard_of(param) is not None}
    return {"process_group": copies, "total_norm": partial(total_norm, parts)}


def total_norm(parts: set[str], norms: Mapping[str, Tensor], where: device) -> Tensor:
    """The ``TotalNorm`` of a copy, of whose parameters ranks have ``parts``; a collective."""
    totals = [
        norm_of_all({name: norm for name, norm in norms.items() if (name in parts) is divided}, where)
        for divided in (True, False)
    ]
    return tensor_shards.whole_norm(*totals)


class EnginesParts(EngineState):
    """The ``Holder`` of one rank's part. ``writes``: of the copy of the model that is written."""

    def __init__(self, optimizer: Any, *, writes: bool) -> None:
        super().__init__(optimizer.access, writes=writes)
        self.divides_weights = True
        first = tensor_shards.tensor_rank() == 0
        self._mine = {name for name, p in self._params.items() if first or tensor_shards.shard_of(p) is not None}

    def entries(self) -> Iterator[tuple[str, Described, list[Span]]]:
        return (entry for entry in super().entries() if entry[0] in self._mine)

    def weight_spans(self, names: set[str]) -> Iterator[Span]:
        return super().weight_spans(names & self._mine)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        return tensor_shards.whole_shape(self._params[name])

    def within(self, name: str, start: int) -> tuple[int, Columns | None]:
        return tensor_shards.within(self._params[name], start)

    def spans(self, name: str, kind: str, start: int, tensor: Tensor, at_hand: Any = None) -> Iterator[Span]:
        """``at_hand`` is for state on a disk, which is refused beside ``tensor``."""
        start, columns = self.within(name, start)
        piece = Piece(name, self.whole_shape(name), start, 0, tensor.numel(), columns)
        return spans_of(kind, piece.shape, piece, tensor)
