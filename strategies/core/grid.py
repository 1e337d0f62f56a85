"""The grid of ranks: which rank works on which stage of the model, on which data, and with which part of each weight.

A replica is the set of ranks that together hold one copy of the model: ``stages`` one behind the other, each of
``tensor`` ranks. There are as many replicas as fit into the world; each is given other data.

Ranks are numbered as launchers place them, neighbours on one machine: tensor ranks next to each other, since they
exchange in every layer; replicas then; stages outermost, since they exchange least. Example of 8 ranks as stages 2 x
data 2 x tensor 2:

    stage 0    replica 0: ranks 0 1    replica 1: ranks 2 3
    stage 1    replica 0: ranks 4 5    replica 1: ranks 6 7

Refused: a world that is not a multiple of the ranks of one replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """The place of one rank."""

    stage: int
    replica: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Grid:
    """``stages`` x ``replicas`` x ``tensor`` ranks."""

    stages: int = 1
    replicas: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.stages * self.replicas * self.tensor

    @property
    def is_plain(self) -> bool:
        """Whether every rank has a whole replica."""
        return self.stages == self.tensor == 1

    @property
    def words(self) -> str:
        """The number of ranks, and how they divide the model."""
        divided = "" if self.is_plain else f" ({self})"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}{divided}"

    def cell(self, rank: int) -> Cell:
        """Where ``rank`` is."""
        stage, rest = divmod(rank, self.replicas * self.tensor)
        return Cell(stage, *divmod(rest, self.tensor))

    def rank(self, cell: Cell) -> int:
        """Who is there."""
        return (cell.stage * self.replicas + cell.replica) * self.tensor + cell.tensor

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that hold parts of the same weights."""
        return [
            [self.rank(Cell(stage, replica, part)) for part in range(self.tensor)]
            for stage in range(self.stages)
            for replica in range(self.replicas)
        ]

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same weights and see different data."""
        return [
            [self.rank(Cell(stage, replica, part)) for replica in range(self.replicas)]
            for stage in range(self.stages)
            for part in range(self.tensor)
        ]

    def pipelines(self) -> list[list[int]]:
        """Ranks through which a micro-batch goes, in its order."""
        return [
            [self.rank(Cell(stage, replica, part)) for stage in range(self.stages)]
            for replica in range(self.replicas)
            for part in range(self.tensor)
        ]

    def __str__(self) -> str:
        sizes = {"pipeline": self.stages, "data": self.replicas, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a model as names of units, in order, the stage of each, and the name of the schedule."""

    parts: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    schedule: str

    def of_stage(self, stage: int) -> list[int]:
        """The parts that ``stage`` holds."""
        return [part for part, holder in enumerate(self.stages) if holder == stage]


def grid_of(world_size: int, *, stages: int = 1, tensor: int = 1) -> Grid:
    """The grid of a world.

    Raises:
        ValueError: the world is not a multiple of a replica's ranks; the message says which sizes are.
    """
    ranks = stages * tensor
    if world_size % ranks:
        replica, fits = Grid(stages, 1, tensor), _multiples(ranks, world_size)
        raise ValueError(f"one replica takes {replica} = {ranks} ranks: start {fits} ranks, not {world_size}")
    return Grid(stages, world_size // ranks, tensor)


def _multiples(ranks: int, wanted: int) -> str:
    """The multiples of ``ranks`` on both sides of ``wanted``."""
    below = wanted // ranks * ranks
    return " or ".join(str(count) for count in (below, below + ranks) if count)
