"""The grid of ranks: which rank works on which stage of the model, on which data, and with which part of each weight.

A replica is the set of ranks that work on the same rows of data: ``stages`` one behind the other, each of ``slices`` x
``tensor`` ranks. Each of the ``slices`` has a part of every row and a copy of the model, or of its stage; ``tensor``
ranks hold a copy together. Each replica is given other data. Ranks are numbered as launchers place them, neighbours on
one machine: tensor ranks next to each other, since they exchange in every layer, as slices do; stages outermost, since
they exchange least. Example of 8 ranks as stages 2 x data 2 x tensor 2:

    stage 0    replica 0: ranks 0 1    replica 1: ranks 2 3
    stage 1    replica 0: ranks 4 5    replica 1: ranks 6 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """The place of one rank."""

    stage: int
    replica: int
    tensor: int = 0
    slice: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """``stages`` x ``replicas`` x ``slices`` x ``tensor`` ranks."""

    stages: int = 1
    replicas: int = 1
    tensor: int = 1
    slices: int = 1

    @property
    def world_size(self) -> int:
        return self.stages * self.replicas * self.slices * self.tensor

    @property
    def is_plain(self) -> bool:
        return self.stages == self.tensor == self.slices == 1

    @property
    def words(self) -> str:
        divided = "" if self.is_plain else f" ({self})"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}{divided}"

    def cell(self, rank: int) -> Cell:
        outer, tensor = divmod(rank, self.tensor)
        outer, slice_index = divmod(outer, self.slices)
        return Cell(*divmod(outer, self.replicas), tensor, slice_index)

    def rank(self, cell: Cell) -> int:
        return ((cell.stage * self.replicas + cell.replica) * self.slices + cell.slice) * self.tensor + cell.tensor

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that differ along ``axis``, a field of ``Cell``, and in nothing else."""
        members: dict[Cell, list[int]] = {}
        for rank in range(self.world_size):
            members.setdefault(self.cell(rank)._replace(**{axis: 0}), []).append(rank)
        return list(members.values())

    def __str__(self) -> str:
        sizes = {"pipeline": self.stages, "data": self.replicas, "sequence": self.slices, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a model as names of units, in order, the stage of each, and the name of the schedule."""

    parts: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    schedule: str

    def of_stage(self, stage: int) -> list[int]:
        return [part for part, holder in enumerate(self.stages) if holder == stage]


def grid_of(world_size: int, *, stages: int = 1, tensor: int = 1, slices: int = 1) -> Grid:
    """The grid of a world. Raise ValueError with those that would do if it is no multiple of a replica's ranks."""
    ranks = stages * tensor * slices
    if world_size % ranks:
        replica, below = Grid(stages, 1, tensor, slices), world_size // ranks * ranks
        fits = " or ".join(str(count) for count in (below, below + ranks) if count)
        raise ValueError(f"one replica takes {replica} = {ranks} ranks: start {fits} ranks, not {world_size}")
    return Grid(stages, world_size // ranks, tensor, slices)
