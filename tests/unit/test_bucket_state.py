"""Policy: only the file that defines a bucket's state writes its fields; all others call its methods."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.buckets.gradient_state import GradientState
from strategies.engine.tensors.parameter_views import ParameterViews

ENGINE = Path(__file__).resolve().parents[2] / "strategies" / "engine"


def fields_of(owner: type) -> list[str]:
    """What the class sets on itself when it is made."""
    if is_dataclass(owner):
        return [field.name for field in fields(owner)]
    source: Any = owner
    return re.findall(r"self\.(\w+)(?=[:,]? )", inspect.getsource(source.__init__))


OWNERS = {
    "bucket_state.py": fields_of(BucketState),
    "gradient_state.py": fields_of(GradientState),
    "parameter_views.py": fields_of(ParameterViews),
}
CHANGES = {
    "add", "append", "clear", "difference_update", "discard", "extend", "insert", "intersection_update", "pop",
    "popitem", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update",
}  # fmt: skip


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
def test_only_the_owner_writes_its_fields(owner: str) -> None:
    names = set(OWNERS[owner])
    assert len(names) > 8
    found = [
        f"{path.relative_to(ENGINE)} {write}"
        for path in ENGINE.rglob("*.py")
        if path.name != owner
        for write in writes(ast.parse(path.read_text()), names)
    ]
    assert not found, found


def test_a_write_is_found_and_a_read_is_none() -> None:
    names = {name for each in OWNERS.values() for name in each}
    for statement in (
        "bucket.pending = Pending.NOTHING",
        "bucket.open += 1",
        "bucket.used: Event = event",
        "del bucket.job",
        "first, bucket.arrived = 1, event",
        "grads.touched.add(index)",
        "bucket.grads.touched |= {index}",
        "self.bucket.grads.norms[index] = norm",
        "views.own.remove(index)",
        "for bucket.present in (False, True): pass",
        "with lock as bucket.future: pass",
    ):
        assert len(list(writes(ast.parse(statement), names))) == 1, statement
    for statement in ("bucket.submit(job)", "if bucket.open: pass", "self.used = 1", "used = bucket.used"):
        assert not list(writes(ast.parse(statement), names)), statement
