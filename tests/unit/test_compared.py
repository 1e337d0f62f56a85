"""Each row of the table in docs/compared.md: our lines pass the check of a config, and their test is there."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch.cli import COMMANDS
from deepstow.trainer.config.check import check

ROOT = Path(__file__).parents[2]
NO = ("no", "refused")


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "compared.md").read_text()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [row for row in cells[2:] if row[1]]  # not titles


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_our_line_is_a_config_or_a_command_and_has_a_test(row: list[str]) -> None:
    assert len(row) == 6 and all(row[:5])
    lines, test = re.findall("`([^`]+)`", row[4]), row[5].strip("`")
    if test:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert bool(test) or row[4].startswith("no")
    if row[4].startswith(NO):
        return
    commands = [line for line in lines if line.startswith("deepstow ")]
    for line in commands:
        assert line.split()[1] in COMMANDS
    written: dict[str, Any] = {}
    for line in lines:
        if ": " in line:
            written |= yaml.safe_load(line)
    assert written or commands or row[4].startswith(("columns", "`train`"))
    base: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "m"}, "data": {"path": "d", "max_length": 8}, "training": {"output_dir": "r"},
    }  # fmt: skip
    if "datasets" in written.get("data", {}):
        del base["data"]["path"]
    tree_of = {name: {**section, **written.get(name, {})} for name, section in base.items()}
    assert check({**written, **tree_of}) == []


def test_the_table_is_one() -> None:
    assert len(ROWS) > 30 and len({row[0] for row in ROWS}) == len(ROWS)
    assert any(row[4] == "no" for row in ROWS)
