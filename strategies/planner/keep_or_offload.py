"""Three ways to fit, one plan: a saved tensor is made again, or waits on the host, or weights make room for it.

Where recomputation was left open, each place on its line of plans (``activation_policy.py``) leaves another budget for
weights, gradients and state; the rule says what moves then (``placement_search.py``), the simulator how long a step
takes. There are several lines: nothing goes to the host; inputs of blocks do; and whatever is cheaper there than made
again, at some prices of a byte on the link. What it really costs depends on all else that crosses the link: the
simulator chooses between lines. Where the host is too small for what all blocks would send, the first ones send.

Places on a grid over all lines are ranked by an estimate, which asks for no layout. The best of them are worked out and
simulated, then what lies half way to the neighbours of the fastest. The fastest plan is taken; of those that are as
fast within ``SAME`` the one that sends the least to the host, then the one that recomputes least. Working out one place
takes about half a second for a hundred buckets, so the answer is near the best place, not always at it.

Where nobody knows the rates nothing can be weighed: blocks are then recomputed only as far as offloading alone does not
make them fit, and nothing saved goes to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from math import inf
from typing import TypeAlias

from strategies.core.facts import Facts, Home, Rates
from strategies.core.layout import Layout
from strategies.core.plan import NONE, Keep, Plan
from strategies.core.protocol import Refusal
from strategies.planner.activation_policy import Line, Prices, Way, pace_of, within_host
from strategies.planner.addresses import arena_bytes
from strategies.planner.placement_search import choose, quickest
from strategies.planner.state_placement import OffloadRequest
from strategies.planner.step_cost import cost_of

GRID = 4  # places per line, besides the first
TRIED = 3  # places that are worked out: of the line on which nothing goes to the host, and of the others
SHARES = (0.1, 0.0)  # prices: of the time that a byte takes to the host and back
SAME = 0.005  # relative difference of simulated times that means nothing
Point: TypeAlias = tuple[int, int]  # a line, and a place on it


def decide(plan: Plan, wishes: OffloadRequest) -> tuple[list[Keep], Layout]:
    """The layout for what ``plan`` keeps, with new answers to what was left open; none, where nothing was.

    Raises:
        Refusal: nothing fits.
    """
    keeps = [plan.keep(unit.name) for unit in plan.facts.units]
    if not any(keep.open for keep in keeps):
        return [], _chosen(plan, wishes)
    search = _Search(plan, wishes)
    point = search.fastest() if search.knows else search.first()
    reason = f"with offload, {'the fastest' if search.knows else 'the least recomputation'} that fits"
    pairs = zip(keeps, search.ways(point), strict=True)
    answers = [way.keep(keep.unit, reason if way.policy != NONE else "all kept") for keep, way in pairs if keep.open]
    return answers, search.layout(point)


def all_prices(facts: Facts, rates: Rates | None, *, may_host: bool) -> list[Prices]:
    """What a byte to the host and back may be taken to cost; first of all, that none goes there."""
    on_device = Prices(pace_of(facts))
    if rates is None or not may_host:
        return [on_device]
    link_s = 1 / rates.up_bytes_per_s + 1 / rates.down_bytes_per_s
    inputs = replace(on_device, link_s=link_s, inputs_only=True)
    return [on_device, inputs, *(replace(on_device, link_s=share * link_s) for share in SHARES)]


def _chosen(plan: Plan, wishes: OffloadRequest) -> Layout:
    return choose(plan.facts_as_kept(), wishes, plan.saved_peak(), plan.hosted_bytes())


class _Search:
    """Layouts and simulated times along the lines."""

    def __init__(self, plan: Plan, wishes: OffloadRequest) -> None:
        self._plan, self._wishes = plan, wishes
        facts = plan.facts
        self._rates = facts.machine.rates if facts.run.forward_flops else None
        keeps = [plan.keep(unit.name) for unit in facts.units]
        pairs = zip(facts.units, keeps, strict=True)
        units = [unit if keep.open else replace(unit, choices=None) for unit, keep in pairs]
        self._kept = cache(self._keep)
        self._found = cache(self._try)
        self._seconds = cache(self._time)
        self._estimated = cache(self._estimate)
        here, *others = all_prices(facts, self._rates, may_host=any(keep.may_host for keep in keeps))
        self._lines = [Line(units, here)]
        if others:
            spare = self._spare_bytes()
            self._lines += [Line(units, within_host(units, each, spare)) for each in others]

    @property
    def knows(self) -> bool:
        """Whether times can be compared."""
        return self._rates is not None

    @property
    def _smallest(self) -> Point:
        """What takes the least of the device: all made again, with inputs on the host if they may be."""
        line = min(1, len(self._lines) - 1)
        return (line, len(self._lines[line].moves))

    def _spare_bytes(self) -> int:
        """Of the host, beside what rests there if all blocks are made again; all of it, where that does not fit."""
        least = self._found((0, len(self._lines[0].moves)))
        taken = arena_bytes(least)[Home.HOST] if isinstance(least, Layout) else 0
        return self._wishes.host_bytes - taken

    def ways(self, point: Point) -> list[Way]:
        """How each unit is kept."""
        line, place = point
        return self._lines[line].at(place)

    def fastest(self) -> Point:
        """The point whose step is simulated to be the shortest."""
        grid = {
            index: sorted({len(line.moves) * part // GRID for part in range(GRID + 1)})
            for index, line in enumerate(self._lines)
        }
        points = [(0, 0), *((line, place) for line, places in grid.items() for place in places if place)]
        ranked = sorted(points, key=self._estimated)
        tried = [*self._fitting(ranked, here=True), *self._fitting(ranked, here=False)]
        if not tried:
            return self._smallest
        line, place = min(tried, key=self._seconds)
        tried += [(line, (place + other) // 2) for other in _neighbours(grid[line], place)]
        best = min(map(self._seconds, tried))
        return min(
            (point for point in tried if self._seconds(point) <= best * (1 + SAME)),
            key=lambda point: (sum(way.hosted_bytes for way in self.ways(point)), point[1]),
        )

    def _fitting(self, points: Sequence[Point], *, here: bool) -> Iterator[Point]:
        """The first ``TRIED`` that fit: with all on the device, or on the other lines."""
        of_line = (point for point in points if (point[0] == 0) is here)
        return islice((point for point in of_line if isinstance(self._found(point), Layout)), TRIED)

    def first(self) -> Point:
        """The first place that fits with all on the device; the last one, where none does."""
        low, high = 0, len(self._lines[0].moves)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if isinstance(self._found((0, middle)), Layout) else (middle + 1, high)
        return (0, low)

    def layout(self, point: Point) -> Layout:
        """What moves there.

        Raises:
            Refusal: nothing fits.
        """
        found = self._found(point)
        if isinstance(found, Refusal):
            raise found
        return found

    def _keep(self, point: Point) -> Plan:
        pairs = zip(self._plan.facts.units, self.ways(point), strict=True)
        return self._plan.amend((way.keep(unit.name, "") for unit, way in pairs), by="joint")

    def _try(self, point: Point) -> Layout | Refusal:
        try:
            return _chosen(self._kept(point), self._wishes)
        except Refusal as refused:
            return refused

    def _time(self, point: Point) -> float:
        found = self._found(point)
        if isinstance(found, Refusal):
            return inf
        assert self._rates is not None
        return cost_of(self._kept(point).facts_as_kept(), found, self._rates).seconds

    def _estimate(self, point: Point) -> float:
        kept = self._kept(point)
        try:
            return quickest(kept.facts_as_kept(), self._wishes, kept.saved_peak(), sure=False) or 0.0
        except Refusal:
            return inf


def _neighbours(places: Sequence[int], place: int) -> list[int]:
    """The places before and after; 0 is on every line."""
    at = places.index(place)
    return [*places[max(0, at - 1) : at], *places[at + 1 : at + 2]]
