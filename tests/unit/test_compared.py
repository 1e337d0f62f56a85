"""Each row of the table in docs/compared.md: our lines pass the check of a config, and a test runs the feature."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch.cli import COMMANDS
from deepstow.trainer.config.check import check

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "docs" / "compared.yaml").read_text())
ROWS = [row for rows in GROUPS.values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=[row["feature"] for row in ROWS])
def test_our_line_is_a_config_or_a_command_and_has_a_test(row: dict[str, str]) -> None:
    if row["here"] == "no":
        assert "test" not in row
        return
    path, _, name = row["test"].partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if row["here"].startswith("refused"):
        return
    lines = re.findall("`([^`]+)`", row["here"])
    commands = [line for line in lines if line.startswith("deepstow ")]
    for line in commands:
        assert line.split()[1] in COMMANDS
    written: dict[str, Any] = {}
    for line in lines:
        if ": " in line:
            written |= yaml.safe_load(line)
    assert written or commands or row["here"].startswith(("columns", "`train`"))
    base: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "m"}, "data": {"path": "d", "max_length": 8}, "training": {"output_dir": "r"},
    }  # fmt: skip
    if "datasets" in written.get("data", {}):
        del base["data"]["path"]
    tree_of = {name: {**section, **written.get(name, {})} for name, section in base.items()}
    assert check({**written, **tree_of}) == []


def test_the_table_is_one() -> None:
    assert len(ROWS) > 30 and len({row["feature"] for row in ROWS}) == len(ROWS)
    assert any(row["here"] == "no" for row in ROWS)
