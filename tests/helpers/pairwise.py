"""Covering tables: few rows in which any two (or three) levels that may meet do meet; the same rows on every run.

Built row by row: each starts from the first combination that no row has yet, and takes for every other factor the level
with which it covers most of what is left. Source of the method: Cohen and others, "The AETG System", 1997.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import TypeAlias

Choice: TypeAlias = tuple[str, object]  # a factor and one of its levels
Combination: TypeAlias = frozenset[Choice]
Row: TypeAlias = dict[str, object]


class Table:
    """Factors with their levels, and pairs of choices that may not meet.

    Args:
        strength: how many levels at a time are to meet.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[object]],
        forbidden: Iterable[tuple[Choice, Choice]] = (),
        strength: int = 2,
    ) -> None:
        self.factors, self.strength = factors, strength
        self.forbidden = [*map(frozenset, forbidden)]

    def legal(self, row: Row) -> bool:
        """Whether no two choices of ``row``, complete or not, are forbidden."""
        choices = row.items()
        return not any(pair <= choices for pair in self.forbidden)

    def completed(self, row: Row) -> bool:
        """Whether a legal row can be made of ``row``, by trying."""
        if not self.legal(row):
            return False
        missing = next((name for name in self.factors if name not in row), None)
        return missing is None or any(self.completed({**row, missing: level}) for level in self.factors[missing])

    def wanted(self) -> Iterator[Combination]:
        """Every combination that the rows must have, in order; only those that some legal row has."""
        for names in combinations(self.factors, self.strength):
            for levels in product(*(self.factors[name] for name in names)):
                if self.completed(row := dict(zip(names, levels, strict=True))):
                    yield frozenset(row.items())

    def rows(self) -> Iterator[Row]:
        """Rows that have every wanted combination."""
        left = dict.fromkeys(self.wanted())
        while left:
            row: Row = dict(next(iter(left)))
            for name in self.factors:
                if name not in row:
                    legal = [level for level in self.factors[name] if self.completed({**row, name: level})]
                    gains = [self._gain(row, (name, level), left) for level in legal]
                    row[name] = legal[gains.index(max(gains))]
            for combination in combinations(row.items(), self.strength):
                left.pop(frozenset(combination), None)
            yield {name: row[name] for name in self.factors}

    def _gain(self, row: Row, choice: Choice, left: Mapping[Combination, object]) -> int:
        """How many combinations that are left ``row`` gets with ``choice``."""
        return sum(frozenset((*others, choice)) in left for others in combinations(row.items(), self.strength - 1))
