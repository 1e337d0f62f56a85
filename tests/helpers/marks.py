"""Marks for cases of a table."""

from collections.abc import Iterable
from typing import Any

import pytest

RARE = (pytest.mark.slow, pytest.mark.rare)


def rarely(*values: Any, id: str | None = None, also: Iterable[pytest.MarkDecorator] = ()) -> Any:
    """A case that takes the path of others which are quicker: it runs in ``make test-rare`` only."""
    return pytest.param(*values, id=id, marks=[*RARE, *also])


def some_rarely(names: Iterable[str], rare: Iterable[str]) -> list[Any]:
    """``names``, of which some are rare."""
    few = set(rare)
    assert few <= set(names)
    return [rarely(name) if name in few else name for name in names]
