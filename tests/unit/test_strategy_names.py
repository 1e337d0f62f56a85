"""No module of ``trainer`` or ``launch`` names a strategy: they ask the strategies, or the plan.

A name may stand in words for people (an error that says which key to write) and in the few files of ``EXEMPT``.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from deepstow.strategies.core.registry import available

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("launch", "trainer") for path in (ROOT / folder).rglob("*.py"))
NAMES = set(available())
# Files with such a word, and what it is there.
EXEMPT = {
    "launch/bench.py": "themes of benchmarks, each about one strategy",
    "trainer/config/arguments.py": "a schedule of the learning rate",
    "trainer/config/importing/rules.py": "the same, and the section that is written for DeepSpeed's offload",
    "trainer/planning/picture.py": "a caption",
    "trainer/planning/plan_for.py": "the Python interface: its arguments are options of these strategies",
    "trainer/run/schedule.py": "a schedule of the learning rate",
    "trainer/run/stowed_trainer.py": "passes the argument `recompute` on to `plan_for`",
}


def uses(source: str) -> Iterator[str]:
    """Places in ``source`` where the name of a strategy is a value, an attribute of strategies, or imported."""
    imported = re.compile(rf"\bstrategies(\.| import )({'|'.join(NAMES)})\b")
    for node in ast.walk(ast.parse(source)):
        found = isinstance(node, ast.Constant) and node.value in NAMES
        if isinstance(node, ast.Attribute):
            found = node.attr in NAMES and ast.unparse(node.value).endswith("strategies")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found = imported.search(ast.unparse(node)) is not None
        if found:
            yield ast.unparse(node)


def test_no_module_names_a_strategy() -> None:
    seen = """
if "offload" in config.strategies: pass
given = config.strategies.offload
from deepstow.strategies.zero import Zero
from deepstow.strategies import offload
import deepstow.strategies.linear
"""
    assert len(list(uses(seen))) == 5
    assert list(uses('raise ConfigError("strategies.zero: not here, as with strategies.offload")')) == []
    found = {str(path.relative_to(ROOT)): list(uses(path.read_text())) for path in FILES}
    named = {path: lines for path, lines in found.items() if lines}
    assert {path: lines for path, lines in named.items() if path not in EXEMPT} == {}
    assert named.keys() == EXEMPT.keys(), "an exemption that nothing needs"
