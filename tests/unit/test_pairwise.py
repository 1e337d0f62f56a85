"""The covering tables: every combination that may be is there, and none that may not."""

from itertools import combinations, product

import pytest

from tests.helpers.grid import BF16, FP32, IN_STAGES, title
from tests.helpers.pairwise import Table


@pytest.mark.parametrize("table", [FP32, BF16, IN_STAGES], ids=["fp32", "bf16", "in stages"])
def test_the_grids_cover_what_is_legal(table: Table) -> None:
    rows = list(table.rows())
    assert all(table.legal(row) and list(row) == list(table.factors) for row in rows)
    met = {frozenset(some) for row in rows for some in combinations(row.items(), table.strength)}
    assert met == set(table.wanted())
    # Every pair, too: those that never meet are those that may not.
    pairs = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    every = {
        frozenset(zip(names, levels, strict=True))
        for names in combinations(table.factors, 2)
        for levels in product(*(table.factors[name] for name in names))
    }
    assert every - pairs == every & set(table.forbidden)
    assert every - pairs
    assert len(set(map(title, rows))) == len(rows)
    assert rows == list(table.rows())


def test_what_cannot_be_completed_is_not_wanted() -> None:
    """b=2 forbids every level of c, so no row has it."""
    table = Table({"a": (1, 2), "b": (1, 2), "c": (1, 2)}, [(("b", 2), ("c", 1)), (("b", 2), ("c", 2))])
    assert all(row["b"] == 1 for row in table.rows())
    assert len(list(table.wanted())) == 4 + 2 + 2
