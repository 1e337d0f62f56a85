"""What messages send people to is there wherever the package is installed: commands, pages and extras."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from deepstow.launch import cli

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for name in ("launch", "strategies", "trainer") for path in sorted((ROOT / name).rglob("*.py"))]
OF_THE_CHECKOUT = re.compile(
    r"\b(launch/\w+\.py|docs/[\w/-]+\.md|configs/[\w-]+\.yaml|make (train|finetune|docs|bench)\b)"
)


def said(path: Path) -> Iterator[str]:
    """Every text of a module that is not documentation of code."""
    tree = ast.parse(path.read_text())
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


TEXT = {path.relative_to(ROOT).as_posix(): "\n".join(said(path)) for path in FILES}
TEXT["trainer/config/foreign.yaml"] = (ROOT / "trainer/config/foreign.yaml").read_text()


def test_no_message_names_a_file_of_the_checkout() -> None:
    assert {path: found for path, text in TEXT.items() if (found := OF_THE_CHECKOUT.findall(text))} == {}


def test_pages_commands_and_extras_that_are_named_are_there() -> None:
    sections = [ROOT / "trainer/config/sections.py", *(ROOT / "trainer/recipes").glob("*/__init__.py")]
    whole = "\n".join([*TEXT.values(), *(path.read_text() for path in sections)])
    pages = set(re.findall(r"deepstow docs ([a-z][a-z-]*)", whole))
    assert {"config", "attention"} <= pages <= {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"\bdeepstow ([a-z]+) (?:--|[A-Z]|runs/)", whole)) <= set(cli.COMMANDS)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(
        re.findall(r"\bneeds\([\"'][\w-]+[\"'], [\"'](\w+)[\"']\)", "\n".join(path.read_text() for path in FILES))
    )
    assert {"lora", "qlora", "tasks", "embedding"} <= named <= set(extras)
    assert [path for path, text in TEXT.items() if "'deepstow[" in text] == ["strategies/core/install.py"]
