"""The docs: their configs are ones, links lead to files, and what is written from the code is as the code has it."""

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch.cli import COMMANDS
from deepstow.trainer.config.check import check
from deepstow.trainer.config.load import merged
from deepstow.trainer.config.yaml_file import parse

ROOT = Path(__file__).resolve().parents[2]
YAML = re.compile(r"^```yaml\n(.*?)^```", re.S | re.M)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if YAML.search(page.read_text())]
REST: dict[str, Any] = {
    "model": {"name_or_path": "m"},
    "data": {"path": "d", "max_length": 8, "eval_fraction": 0.1},
    "training": {"output_dir": "r"},
}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_yaml_of_a_page_is_a_config_or_a_part_of_one(page: Path) -> None:
    """It passes the check, with what every config has; a first key that comes again begins another way to write it."""
    found = (re.split(f"^(?={text.partition(':')[0]}:)", text, flags=re.M) for text in YAML.findall(page.read_text()))
    for text in (part for parts in found for part in parts if part):
        tree, document = parse(text, page.name)
        whole = merged(REST, tree)
        for key, other in (("data.path", "data.datasets"), ("model.name_or_path", "model.config")):
            (section, name), instead = key.split("."), other.split(".")[1]
            if instead in whole[section]:
                del whole[section][name]
        assert document.problems == [] and check(whole) == [], text


def test_pages_outside_of_the_docs_link_to_files() -> None:
    """MkDocs sees to those of the docs."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())]
    assert links and [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_page_of_commands_is_current() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "commands.py"))["text"]()
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == made, "run python .ci/commands.py"


def test_each_row_of_the_comparison_is_a_config_or_a_command_and_has_a_test() -> None:
    rows = [row for rows in yaml.safe_load((ROOT / "docs" / "compared.yaml").read_text()).values() for row in rows]
    assert len(rows) > 30
    for row in (row for row in rows if row["here"] != "no"):
        path, _, name = row["test"].partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
        lines = re.findall("`([^`]+)`", row["here"] * (not row["here"].startswith("refused")))
        assert all(line.split()[1] in COMMANDS for line in lines if line.startswith("deepstow "))
        written: dict[str, Any] = {}
        for line in lines:
            written |= yaml.safe_load(line) if ": " in line else {}
        whole = merged(REST | {"data": {"path": "d", "max_length": 8}}, written)
        if "datasets" in whole["data"]:
            del whole["data"]["path"]
        assert check(whole) == [], row
