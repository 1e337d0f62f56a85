"""Marks for cases of a table."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

RARE = (pytest.mark.slow, pytest.mark.rare)


def rarely(*values: Any, id: str | None = None, also: Iterable[pytest.MarkDecorator] = ()) -> Any:
    """A case that takes the path of others which are quicker: it runs in ``make test-rare`` only."""
    return pytest.param(*values, id=id, marks=[*RARE, *also])


def slowly(*values: Any, id: str | None = None) -> Any:
    """A case that takes the path of others with another value: it runs in ``make test-all``, not in ``make test``."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def in_turns(first: Iterable[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs of both; each of ``first`` with one of ``second`` in turn, and slowly with the others."""
    pairs = ((number, one, at, other) for number, one in enumerate(first) for at, other in enumerate(second))
    return [(one, other) if number % len(second) == at else slowly(one, other) for number, one, at, other in pairs]
