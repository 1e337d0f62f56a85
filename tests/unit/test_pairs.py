"""The table of docs/parallel.md says of every two strategies whether they go together: as they refuse it themselves."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.core.registry import available
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning.from_config import check_options
from tests.helpers.tiny import run_config

REPO = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"zero": {"stage": stage}} for stage in (1, 2, 3)},
    **{name: {name: {"degree": 2}} for name in ("tensor", "experts", "sequence")},
    "pipeline": {"pipeline": {"stages": 2}},
    "collectives": {"collectives": {"hierarchical": True}},
    **{name: {name: {}} for name in ("offload", "recompute", "cross_entropy", "linear")},
}
SECTION = (REPO / "docs/parallel.md").read_text().split("## Which go together\n")[1].split("\n## ")[0]
ROWS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line[:1] == "|"]


def said() -> dict[frozenset[str], str]:
    """The signs of the table, whose columns and rows have the same order; a row ends at its own column."""
    (_, *columns), _, *rows = [row for row in ROWS if len(row) > 3]
    cells = {frozenset((row[0], column)): sign for row in rows for column, sign in zip(columns, row[1:], strict=True)}
    return {pair: sign for pair, sign in cells.items() if len(pair) == 2 and sign}


def pairs() -> list[frozenset[str]]:
    found = [frozenset(pair) for pair in combinations(OPTIONS, 2)]
    return [pair for pair in found if sum(name.startswith("zero") for name in pair) < 2]


def goes(pair: frozenset[str]) -> bool:
    strategies = {name: options for key in pair for name, options in OPTIONS[key].items()}
    try:
        check_options(run_config(strategies=strategies, gradient_accumulation_steps=4), 8, installed=False)
    except ConfigError:
        return False
    return True


def test_signs_are_what_strategies_refuse() -> None:
    table = said()
    assert {name for options in OPTIONS.values() for name in options} | {"buffers"} == set(available())
    assert table.keys() == set(pairs())
    assert {pair: sign == "+" for pair, sign in table.items()} == {pair: goes(pair) for pair in pairs()}
    assert set(table.values()) == {"+", "-"}


def test_each_refusal_has_a_reason_and_each_test_is_there() -> None:
    reasons = {
        frozenset(name.strip(" `") for name in row[0].split(" x ")) for row in ROWS if len(row) == 2 and " x " in row[0]
    }
    split = {frozenset((one, other)) for pair in reasons for one, other in combinations(spread(pair), 2)}
    assert {pair for pair, sign in said().items() if sign == "-"} <= split
    named = re.findall(r"`(tests/[\w/]+\.py)`(?: \(`(\w+)`\))?", SECTION)
    assert named
    for file, test in named:
        assert f"def {test}" in (REPO / file).read_text(), (file, test)


def spread(pair: frozenset[str]) -> list[str]:
    """The keys of the table that a reason's line is about; ``zero`` without a number is all stages."""
    return [key for name in pair for key in OPTIONS if key == name or (name == "zero" and key.startswith("zero"))]


@pytest.mark.parametrize("pair", [("tensor", "recompute"), ("tensor", "experts")])
def test_the_walk_can_tell(pair: tuple[str, str]) -> None:
    assert goes(frozenset(pair)) is (pair[1] == "recompute")
