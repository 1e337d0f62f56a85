"""Policy: only the file that defines a bucket's state writes it; all others call its methods."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "strategies" / "engine"
OWNERS = {
    "bucket_state.py": {"pending", "present", "given_up", "open", "job", "replaced", "overlapping"},
    "gradient_state.py": {"landed", "unsent", "touched", "summed", "spent", "zeroed", "norms"},
    "parameter_views.py": {"own", "versions", "counts", "bound", "shown"},
}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "sort", "update"}


def writes(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Every place that assigns to one of these fields, or to an element of one, or changes a collection in it.
    Attributes of ``self`` are another class's own, those of ``ctx`` an autograd function's.
    """
    for node in ast.walk(tree):
        target: Any = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        elif not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        while isinstance(target, ast.Subscript):
            target = target.value
        is_field = isinstance(target, ast.Attribute) and target.attr in names
        if is_field and ast.unparse(target.value) not in ("self", "ctx"):
            yield f"line {target.lineno}: {ast.unparse(target)}"


@pytest.mark.parametrize("owner", OWNERS)
def test_only_the_owner_writes_its_state(owner: str) -> None:
    names = OWNERS[owner]
    assert list(writes(ast.parse("bucket.grads.{0}[1] += 2; bucket.{0}.add(1)".format(min(names))), names))
    found = [
        f"{path.relative_to(ENGINE)} {write}"
        for path in ENGINE.rglob("*.py")
        if path.name != owner
        for write in writes(ast.parse(path.read_text()), names)
    ]
    assert not found, found
