"""The covering tables: what no row can have is not asked for."""

from tests.helpers.pairwise import Table


def test_what_cannot_be_completed_is_not_wanted() -> None:
    """b=2 forbids every level of c, so no row has it."""
    table = Table({"a": (1, 2), "b": (1, 2), "c": (1, 2)}, [(("b", 2), ("c", 1)), (("b", 2), ("c", 2))])
    assert all(row["b"] == 1 for row in table.rows())
    assert len(list(table.wanted())) == 4 + 2 + 2
