"""Three ways to fit, one plan: saved tensors are recomputed, or wait on the host, or weights are offloaded instead.

If recomputation was left open, each position on its trade-off curve (``activation_policy.py``) leaves another budget
for weights, gradients and state; ``placement_search.py`` decides what moves then, and the simulator how long a step
takes. There are several curves: nothing goes to the host; inputs of blocks do; and whatever is cheaper there than
recomputed, at some costs of a byte on the link. What it really costs depends on all else that crosses the link: the
simulator chooses between curves. If the host is too small for what all blocks would send, only the first ones send.

Positions on a grid over all curves are ranked by an estimate, which needs no layout. The best of them are worked out as
mixes (``site_search.py``) and simulated, then those half a step and a quarter beside the fastest. Of those that are as
fast within ``SAME`` the one that sends the least to the host is taken, then the one that recomputes least.

With unknown rates nothing can be compared: blocks are then recomputed only as far as offloading alone does not make
them fit, and nothing saved goes to the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from math import inf
from typing import TypeAlias

from deepstow.strategies.core.facts import Facts, Rates, Tier
from deepstow.strategies.core.layout import Layout
from deepstow.strategies.core.plan import NONE, Keep, Plan
from deepstow.strategies.planner.activation_policy import (
    KeepCosts,
    KeepOption,
    TradeoffCurve,
    within_host,
    work_seconds,
)
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.placement_search import PlacementSearch
from deepstow.strategies.planner.places import OffloadRequest

GRID = 4  # positions per curve, besides the first
TRIED = 3  # positions that are worked out: of the curve on which nothing goes to the host, and of the others
SHARES = (0.1, 0.0)  # costs of a byte on the link: parts of the time that it takes to the host and back
SAME = 0.005  # relative difference of simulated times that means nothing
Position: TypeAlias = tuple[int, int]  # a curve, and a position on it


def decide(plan: Plan, request: OffloadRequest, *, brief: bool = False) -> tuple[list[Keep], Layout]:
    """The layout, and new answers to what ``plan`` left open: none if it left nothing open.

    Args:
        brief: a mix is enough.

    Raises:
        Refusal: nothing fits.
    """
    keeps = [plan.keep(unit.name) for unit in plan.facts.units]
    if not any(keep.open for keep in keeps):
        return [], _placement_search(plan, request).best(brief=brief)
    search = _Search(plan, request)
    position = search.fastest() if search.rates else search.first()
    reason = f"with offload, {'the fastest' if search.rates else 'the least recomputation'} that fits"
    pairs = zip(keeps, search.options(position), strict=True)
    answers = [o.keep(keep.unit, reason if o.policy != NONE else "all kept") for keep, o in pairs if keep.open]
    return answers, search.at(position).best(brief=brief)


def keep_costs(facts: Facts, rates: Rates | None, *, may_host: bool) -> list[KeepCosts]:
    """What a byte to the host and back is assumed to cost on each curve; on the first one nothing goes there."""
    on_device = KeepCosts(work_seconds(facts))
    if rates is None or not may_host:
        return [on_device]
    link_s = 1 / rates.up_bytes_per_s + 1 / rates.down_bytes_per_s
    inputs = replace(on_device, link_s=link_s, inputs_only=True)
    return [on_device, inputs, *(replace(on_device, link_s=share * link_s) for share in SHARES)]


def _placement_search(plan: Plan, request: OffloadRequest) -> PlacementSearch:
    return PlacementSearch(plan.facts_as_kept(), request, plan.transient_peak(), plan.hosted_bytes() + _beside(plan))


def _beside(plan: Plan) -> int:
    """What strategies that have decided have set aside on the host."""
    return sum(reserve.num_bytes for reserve in plan.reserves(Tier.HOST))


class _Search:
    """Placement searches along the curves (``at``); ``rates`` are None if times cannot be compared."""

    def __init__(self, plan: Plan, request: OffloadRequest) -> None:
        self._plan = plan
        self._request = request
        facts = plan.facts
        self.rates = facts.machine.rates if facts.run.forward_flops else None
        keeps = [plan.keep(unit.name) for unit in facts.units]
        pairs = zip(plan.units(), keeps, strict=True)
        units = [unit if keep.open else replace(unit, choices=None) for unit, keep in pairs]
        self.at = cache(self._at)
        device_costs, *host_costs = keep_costs(facts, self.rates, may_host=any(keep.may_host for keep in keeps))
        # Where micro-batches take turns, a unit sends what all of them save at once.
        host_costs = [replace(costs, spread=facts.run.layerwise > 1) for costs in host_costs]
        self._curves = [TradeoffCurve(units, device_costs)]
        if host_costs:
            spare = self._spare_bytes() // facts.run.layerwise
            self._curves += [TradeoffCurve(units, within_host(units, costs, spare)) for costs in host_costs]

    def _spare_bytes(self) -> int:
        """Host bytes that are left if all blocks are recomputed; all of the budget if that does not fit."""
        quick = self.at((0, len(self._curves[0].moves))).quick
        return self._request.host_bytes - _beside(self._plan) - (place(quick[0]).num_bytes(Tier.HOST) if quick else 0)

    def options(self, position: Position) -> list[KeepOption]:
        """How each unit is kept."""
        curve, at = position
        return self._curves[curve].at(at)

    def fastest(self) -> Position:
        """The position with the shortest simulated step."""
        lengths = [len(curve.moves) for curve in self._curves]
        positions = ((curve, length * n // GRID) for curve, length in enumerate(lengths) for n in range(1, GRID + 1))
        grid = {(0, 0), *(position for position in positions if position[1])}
        ranked = sorted(grid, key=lambda position: (self._estimate(position), position))
        tried = [*self._fitting(ranked, here=True), *self._fitting(ranked, here=False)]
        if not tried:  # the least of the device: all recomputed, with inputs on the host if they may be
            curve = min(1, len(self._curves) - 1)
            return (curve, lengths[curve])
        for finer in (2, 4):
            curve, at = min(tried, key=self._seconds)
            step = lengths[curve] // (finer * GRID)
            tried += [(curve, beside) for beside in (at - step, at + step) if 0 < beside <= lengths[curve]]
        longest = min(map(self._seconds, tried)) * (1 + SAME)
        return min(
            (position for position in tried if self._seconds(position) <= longest),
            key=lambda position: (sum(option.hosted_bytes for option in self.options(position)), position[1]),
        )

    def _fitting(self, positions: Sequence[Position], *, here: bool) -> Iterator[Position]:
        """The first ``TRIED`` that fit: with all saved tensors on the device, or on the other curves."""
        of_curve = (position for position in positions if (position[0] == 0) is here)
        return islice((position for position in of_curve if self.at(position).quick), TRIED)

    def first(self) -> Position:
        """The first position that fits with all saved tensors on the device; the last one if none does."""
        positions = range(len(self._curves[0].moves))
        return (0, bisect_left(positions, True, key=lambda at: self.at((0, at)).found() is not None))

    def _at(self, position: Position) -> PlacementSearch:
        pairs = zip(self._plan.facts.units, self.options(position), strict=True)
        still_open = ((unit.name, option) for unit, option in pairs if self._plan.keep(unit.name).open)
        plan = self._plan.amend((option.keep(name, "") for name, option in still_open), by="offload")
        return _placement_search(plan, self._request)

    def _seconds(self, position: Position) -> float:
        quick = self.at(position).quick
        return quick[1] if quick else inf

    def _estimate(self, position: Position) -> float:
        seconds = self.at(position).estimated()
        return inf if seconds is None else seconds
