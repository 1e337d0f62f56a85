"""The grid of ranks: each rank is in one group of every kind, and groups are those that share what they have to."""

from __future__ import annotations

import pytest

from strategies.core.grid import Cell, Grid, grid_of


def test_groups_of_eight_ranks() -> None:
    grid = Grid(stages=2, replicas=2, tensor=2)
    assert grid.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("replica") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("stage") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.cell(6) == Cell(stage=1, replica=1, tensor=0)
    uneven = Grid(stages=2, replicas=3, tensor=4)
    assert [uneven.rank(uneven.cell(rank)) for rank in range(24)] == list(range(24))
    assert [len(uneven.groups(axis)[0]) for axis in Cell._fields] == [2, 3, 4]
    assert str(grid) == "pipeline 2 x data 2 x tensor 2"


def test_a_world_that_is_no_multiple_names_those_that_are() -> None:
    assert grid_of(8, stages=2, tensor=2) == Grid(2, 2, 2)
    with pytest.raises(
        ValueError, match="one replica takes pipeline 2 x tensor 3 = 6 ranks: start 6 or 12 ranks, not 8"
    ):
        grid_of(8, stages=2, tensor=3)
    with pytest.raises(ValueError, match=r"start 4 ranks, not 1$"):
        grid_of(1, tensor=4)
