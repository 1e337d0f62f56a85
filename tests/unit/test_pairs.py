"""The table of docs/compatibility.md says of every two strategies whether they go together: as runs refuse it."""

from itertools import combinations
from pathlib import Path

from deepstow.trainer.config.doc import variants
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning.from_config import check_options
from tests.helpers.tiny import run_config

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs/compatibility.md").read_text()
VARIANTS = variants()


def said() -> dict[frozenset[str], bool]:
    """The signs of the first table, whose columns and rows have the same order; a row ends at its own column."""
    lines = PAGE[PAGE.index("|") :].split("\n\n")[0].splitlines()
    (_, *columns), _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    cells = {frozenset((row[0], column)): sign for row in rows for column, sign in zip(columns, row[1:], strict=True)}
    return {pair: sign == "+" for pair, sign in cells.items() if sign}


def goes(*pair: str) -> bool:
    strategies = dict(VARIANTS[each] for each in pair)
    try:
        check_options(run_config(strategies=strategies, gradient_accumulation_steps=4), 8, installed=False)
    except ConfigError:
        return False
    return True


def test_signs_are_what_a_run_refuses() -> None:
    pairs = [pair for pair in combinations(VARIANTS, 2) if len({VARIANTS[each][0] for each in pair}) == 2]
    assert said() == {frozenset(pair): goes(*pair) for pair in pairs}
    assert set(said().values()) == {True, False}
