"""No module of ``trainer`` or ``launch`` names a strategy: they ask the strategies, or the plan.

A name may stand in words for people (an error that says which key to write) and in the few files of ``EXEMPT``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.core.registry import available

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("launch", "trainer") for path in (ROOT / folder).rglob("*.py"))
LOOK_UPS = ("get", "pop", "setdefault", "find", "getattr", "hasattr", "setattr", "import_module")
# Files whose own interface has arguments that are called like strategies.
EXEMPT = {
    "launch/bench.py": "themes of benchmarks, each about one strategy",
    "trainer/planning/plan_for.py": "the Python interface: its arguments are options of these strategies",
    "trainer/run/stowed_trainer.py": "passes the argument `recompute` on to `plan_for`",
}


def uses(source: str) -> Iterator[str]:
    """Places in ``source`` where code depends on the name of a strategy."""
    names = set(available())

    def is_name(node: ast.AST) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(is_name(item) for item in node.elts)
        return isinstance(node, ast.Constant) and node.value in names

    for node in ast.walk(ast.parse(source)):
        found = False
        if isinstance(node, ast.Compare):
            found = any(is_name(side) for side in (node.left, *node.comparators))
        elif isinstance(node, ast.Subscript):
            found = is_name(node.slice) and ast.unparse(node.value) != "Literal"
        elif isinstance(node, ast.Attribute):
            found = node.attr in names and ast.unparse(node.value).endswith("strategies")
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found = called in LOOK_UPS and any(is_name(argument) for argument in node.args)
        elif isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            found = bool(imported & {f"strategies.{name}" for name in names})
        elif isinstance(node, ast.Import):
            found = any(alias.name in {f"strategies.{name}" for name in names} for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            found = is_name(node.value)  # a list of names to look for
        elif isinstance(node, ast.Dict):
            found = any(key is not None and is_name(key) for key in node.keys)
        if found:
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "line",
    [
        'if "offload" in config.strategies: pass',
        'chosen = name in ("zero", "linear")',
        'given = config.strategies["recompute"]',
        'given = config.strategies.get("zero")',
        "given = config.strategies.offload",
        "from strategies import offload",
        "import strategies.linear",
        'COUNTED = ("zero", "offload", "linear")',
        'changed = {**strategies, "buffers": made}',
    ],
)
def test_every_way_of_naming_one_is_seen(line: str) -> None:
    assert len(list(uses(line))) == 1


def test_words_for_people_are_not_meant() -> None:
    text = (
        'raise ConfigError("strategies.zero: not here, as with strategies.offload")\nkind: Literal["linear"] = "linear"'
    )
    assert list(uses(text)) == []


def test_no_module_names_a_strategy() -> None:
    found = {str(path.relative_to(ROOT)): list(uses(path.read_text())) for path in FILES}
    assert "trainer/planning/facts.py" in found
    named = {path: lines for path, lines in found.items() if lines}
    assert {path: lines for path, lines in named.items() if path not in EXEMPT} == {}
    assert named.keys() == EXEMPT.keys(), "an exemption that nothing needs"
