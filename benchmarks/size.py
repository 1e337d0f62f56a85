"""How large the project is: statements, lines and files of Python by folder.

python -m deepstow.benchmarks.size
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from deepstow.strategies.report.table import table

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("strategies", "trainer", "launch", "benchmarks")  # whose statements the redesign counts together
BESIDES = ("tests",)


def counted(paths: Iterable[Path]) -> tuple[int, int, int]:
    """Statements (``ast.stmt``: definitions, docstrings and imports among them), lines, and files."""
    texts = [path.read_text() for path in paths]
    statements = sum(isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    return statements, sum(text.count("\n") for text in texts), len(texts)


def files(folder: str) -> list[Path]:
    return sorted((REPO / folder).rglob("*.py"))


def rows() -> list[tuple[str, ...]]:
    """Of each folder, of the folders in it, and of those that are counted together."""
    named: list[tuple[str, list[Path]]] = []
    for folder in (*FOLDERS, *BESIDES):
        named.append((folder, files(folder)))
        inner = sorted({path.relative_to(REPO / folder).parts[0] for path in files(folder)})
        named += [(f"{folder}/{name}", files(f"{folder}/{name}")) for name in inner if not name.endswith(".py")]
    named.append((" + ".join(FOLDERS), [path for folder in FOLDERS for path in files(folder)]))
    return [(name, *(f"{number:,}" for number in counted(paths))) for name, paths in named]


if __name__ == "__main__":
    print("\n".join(table(("folder", "statements", "lines", "files"), rows(), markdown=True)))
