"""Two ways to fit, one plan: what is not kept for backward need not be moved, and what is moved leaves room to keep.

Where recomputation was left open, each place on its line of plans (``keep.py``) leaves another budget for weights,
gradients and state; the rule says what moves then (``rule.py``), the simulator how long a step takes. The fastest pair
is taken; of those that are equally fast within ``SAME`` the one that recomputes least. Places are tried on a grid, then
between the best one and its neighbours, so the answer is near the best place; more would take longer than it
saves, for each place asks the whole rule (about a second for a hundred buckets).

Where nobody knows the rates nothing can be weighed: blocks are then recomputed only as far as offloading alone
does not make them fit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf

from strategies.core.layout import Layout
from strategies.core.plan import NONE, Keep, Plan
from strategies.core.protocol import Refusal
from strategies.planner.frames import Wishes
from strategies.planner.keep import Line, kept_as, pace_of
from strategies.planner.price import price_of
from strategies.planner.rule import choose

GRID = 4
HALVINGS = 1
SAME = 0.005  # relative difference of simulated times that means nothing


def decide(plan: Plan, wishes: Wishes) -> tuple[list[Keep], Layout]:
    """The layout for what ``plan`` keeps, with new answers to what was left open; none, where nothing was.

    Raises:
        Refusal: nothing fits.
    """
    if not any(plan.keep(unit.name).open for unit in plan.facts.units):
        return [], choose(plan.facts_as_kept(), wishes, plan.saved_peak())
    search = _Search(plan, wishes)
    place = search.fastest() if search.knows else search.first()
    reason = f"with offload, {'the fastest' if search.knows else 'the least recomputation'} that fits"
    chosen = plan.facts.units, search.line.at(place)
    keeps = [
        way.keep(unit.name, reason if way.policy != NONE else "all kept")
        for unit, way in zip(*chosen, strict=True)
        if plan.keep(unit.name).open
    ]
    return keeps, search.layout(place)


class _Search:
    """Layouts and simulated times along the line."""

    def __init__(self, plan: Plan, wishes: Wishes) -> None:
        self._plan, self._wishes = plan, wishes
        facts = plan.facts
        self._rates = facts.machine.rates if facts.run.forward_flops else None
        open_ = {unit.name for unit in facts.units if plan.keep(unit.name).open}
        units = [unit if unit.name in open_ else replace(unit, choices=None) for unit in facts.units]
        self.line = Line(units, pace_of(facts))
        self._found = cache(self._try)
        self._seconds = cache(self._time)

    @property
    def knows(self) -> bool:
        """Whether times can be compared."""
        return self._rates is not None

    def fastest(self) -> int:
        """The place whose step is simulated to be the shortest."""
        last = len(self.line.moves)
        tried = sorted({last * part // GRID for part in range(GRID + 1)})
        for _ in range(HALVINGS):
            at = tried.index(min(tried, key=self._seconds))
            near = tried[max(0, at - 1) : at + 2]
            tried = sorted({*tried, *((low + high) // 2 for low, high in pairwise(near))})
        best = min(map(self._seconds, tried))
        return next(place for place in tried if self._seconds(place) <= best * (1 + SAME))

    def first(self) -> int:
        """The first place that fits; the last one, where none does."""
        low, high = 0, len(self.line.moves)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if isinstance(self._found(middle), Layout) else (middle + 1, high)
        return low

    def layout(self, place: int) -> Layout:
        """What moves at ``place``.

        Raises:
            Refusal: nothing fits.
        """
        found = self._found(place)
        if isinstance(found, Refusal):
            raise found
        return found

    def _try(self, place: int) -> Layout | Refusal:
        ways = self.line.at(place)
        pairs = zip(self._plan.facts.units, ways, strict=True)
        kept = self._plan.amend((way.keep(unit.name, "") for unit, way in pairs), by="joint")
        try:
            return choose(kept.facts_as_kept(), self._wishes, kept.saved_peak())
        except Refusal as refused:
            return refused

    def _time(self, place: int) -> float:
        found = self._found(place)
        if isinstance(found, Refusal):
            return inf
        assert self._rates is not None
        return price_of(kept_as(self._plan.facts, self.line.at(place)), found, self._rates).seconds
