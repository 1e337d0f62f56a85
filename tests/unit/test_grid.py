"""The grid of ranks: each rank is in one group of every kind, and groups are those that share what they have to."""

from __future__ import annotations

import pytest

from strategies.core.grid import Cell, Grid, grid_of

SIZES = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2), (2, 1, 2), (2, 3, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_rank_is_in_one_group_of_each_kind(sizes: tuple[int, int, int]) -> None:
    grid = Grid(*sizes)
    ranks = list(range(grid.world_size))
    assert [grid.rank(grid.cell(rank)) for rank in ranks] == ranks
    for axis, size in zip(Cell._fields, sizes, strict=True):
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == ranks
        assert {len(group) for group in groups} == {size}


def test_groups_of_eight_ranks() -> None:
    grid = Grid(stages=2, replicas=2, tensor=2)
    assert grid.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("replica") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("stage") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.cell(6) == Cell(stage=1, replica=1, tensor=0)
    assert str(grid) == "pipeline 2 x data 2 x tensor 2"


def test_a_world_that_is_no_multiple_names_those_that_are() -> None:
    assert grid_of(8, stages=2, tensor=2) == Grid(2, 2, 2)
    with pytest.raises(
        ValueError, match="one replica takes pipeline 2 x tensor 3 = 6 ranks: start 6 or 12 ranks, not 8"
    ):
        grid_of(8, stages=2, tensor=3)
    with pytest.raises(ValueError, match=r"start 4 ranks, not 1$"):
        grid_of(1, tensor=4)
