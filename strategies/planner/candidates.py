"""Candidates: layouts of one family of state placements within a budget, the most promising ones of them worked out.

The first state placement (``state_placement.py``) that fits as it is moves the least. Others may be faster: fewer
states on the host with offloaded weights instead (``weight_schedule.py``), or updates shared between the CPU and the
link. Those are ranked by an estimate (``estimate.py``) over a sample of all placements that keep more on the device,
and the best are worked out. Which of them is the fastest is for the simulator to say (``placement_search.py``).

What the host has no room for is left out before it is worked out. A layout whose copies of offloaded weights turn out
not to fit there is made again with as few copies as its placement allows (``least_memory.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import inf
from typing import TypeVar

from strategies.core.facts import Facts, Home
from strategies.core.layout import Layout
from strategies.planner import weight_schedule
from strategies.planner.addresses import place
from strategies.planner.estimate import Estimate
from strategies.planner.greedy import DoesNotFit
from strategies.planner.least_memory import fewest_copies
from strategies.planner.state_placement import OffloadRequest, StatePlacement, StatePlacements

ESTIMATED = 24  # placements that are estimated, each with several shares of streamed updates
BEYOND = 8  # placements that offload more than they have to
TRIED = 3  # of those, placements that are worked out; over ranks, twice as many

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A placement, the device bytes left for its offloadable weights, and the estimated seconds of a step."""

    placement: StatePlacement
    room: int
    seconds: float

    @property
    def promise(self) -> tuple[float, int, int, int]:
        """The estimated seconds, and for equal ones how much is offloaded."""
        return (self.seconds, self.placement.hosted, self.placement.grads_down, self.placement.eighths)


class Candidates:
    """Layouts of the placements of one family.

    Args:
        host_room: bytes that the arena on the host may have.
        knows_rates: layouts can be compared by time; else the first one that fits is wanted.
    """

    def __init__(
        self, facts: Facts, request: OffloadRequest, placements: StatePlacements, host_room: int, *, knows_rates: bool
    ) -> None:
        self._facts, self._request, self._placements = facts, request, placements
        self._host_room, self._knows_rates = host_room, knows_rates
        self._sizes, self._all = placements.sizes, placements.all()
        if knows_rates:
            self._estimate = Estimate(facts, request)
            self._load = cache(lambda placement: self._estimate.load(placements.placed(placement)))

    def layouts(self, device_room: int) -> list[Layout]:
        """Layouts whose arenas are within ``device_room`` and the room on the host, what moves the least first."""
        if self._request.weights == "streamed":
            made = self._windows(device_room)
            return [layout for layout in made if place(layout).num_bytes(Home.HOST) <= self._host_room]
        fits = (sizes.device <= device_room and sizes.host <= self._host_room for sizes in map(self._sizes, self._all))
        first = next((index for index, fit in enumerate(fits) if fit), None)
        if self._knows_rates:
            here = len(self._all) if first is None else first + 1
            return self._fastest([*self._all[:here], *spread(self._all[here:], BEYOND)], device_room)
        return (
            list(islice(self._ends(device_room), 1)) if first is None else [self._placements.layout(self._all[first])]
        )

    def estimated(self, device_room: int, *, sure: bool) -> float | None:
        """The estimated seconds of the most promising placement; None if there is none.

        Args:
            sure: only of layouts that fit. Otherwise it may turn out not to fit, and the answer comes in milliseconds.
        """
        for candidate in self._ranked(self._all, device_room, ESTIMATED // 2):
            if not sure or self._request.weights == "streamed" or self._worked_out(candidate) is not None:
                return candidate.seconds
        return None

    def _fastest(self, placements: Sequence[StatePlacement], room: int) -> list[Layout]:
        """The most promising layouts of these placements: as they are, with offloaded weights or streamed updates."""
        number = TRIED if self._request.ways == 1 else 2 * TRIED
        made = map(self._worked_out, self._most_promising(self._ranked(placements, room)))
        return list(islice((layout for layout in made if layout is not None), number))

    def _most_promising(self, ranked: Sequence[_Candidate]) -> list[_Candidate]:
        """The most promising share of streamed updates of each placement, in order, each with the share below it: the
        estimate knows no waiting, so that it streams too much.

        Where ranks exchange what they update there is more waiting, which the estimate does not know: before them, of
        the candidates that stream nothing, the most promising one, and those with the most and the least on the host.
        """
        plain = [one for one in ranked if not one.placement.eighths] if self._request.ways > 1 else []
        by_host = sorted(plain, key=lambda one: one.placement.hosted)
        known, taken, found = {one.placement: one for one in ranked}, set[StatePlacement](), list[_Candidate]()
        for one in ranked:
            bare = replace(one.placement, eighths=0)
            if bare not in taken:
                taken.add(bare)
                below = known.get(replace(bare, eighths=one.placement.eighths - 1))
                found += [one] if below is None else [one, below]
        return list(dict.fromkeys([*plain[:1], *by_host[-1:], *by_host[:1], *found]))

    def _ranked(self, placements: Sequence[StatePlacement], room: int, number: int = ESTIMATED) -> list[_Candidate]:
        """Candidates that may fit, from ``number`` of the placements and from some around the most promising one of
        them, the fastest by estimate first.
        """
        found: dict[int, list[_Candidate]] = {}

        def fastest(index: int) -> float:
            if index not in found:
                found[index] = list(self._of(placements[index], room))
            return min((one.seconds for one in found[index]), default=inf)

        best = min(spread(range(len(placements)), number), key=fastest, default=0)
        step = len(placements) // number
        while step:
            best = min([best, *(at for at in (best - step, best + step) if 0 <= at < len(placements))], key=fastest)
            step //= 2
        return sorted((one for some in found.values() for one in some), key=lambda one: one.promise)

    def _of(self, placement: StatePlacement, room: int) -> Iterator[_Candidate]:
        """The candidates of one placement that may fit, one for each share of streamed updates."""
        for each in self._placements.with_streaming(placement):
            sizes = self._sizes(each)
            if sizes.host <= self._host_room and room - sizes.rest > 0 and sizes.largest_unit <= room - sizes.rest:
                yield self._candidate(each, room)

    def _candidate(self, placement: StatePlacement, device_room: int) -> _Candidate:
        sizes = self._sizes(placement)
        room = device_room - sizes.rest
        if not self._knows_rates:
            return _Candidate(placement, room, 0.0)
        away = sizes.weights if self._request.weights == "streamed" else max(0, sizes.weights - room)
        return _Candidate(placement, room, self._estimate.seconds(self._load(placement), away))

    def _ends(self, room: int) -> Iterator[Layout]:
        """The last placement and the first one with offloaded weights, if they fit."""
        made = (self._worked_out(self._candidate(placement, room)) for placement in (self._all[-1], self._all[0]))
        return (layout for layout in made if layout is not None)

    def _worked_out(self, candidate: _Candidate) -> Layout | None:
        """The candidate's layout; None if it turns out not to fit."""
        placement, room = candidate.placement, candidate.room
        layout, indices = self._placements.layout(placement), self._placements.offloadable(placement)
        try:
            made = weight_schedule.fitted(self._facts, layout, indices, room, self._request.prefetch)
        except DoesNotFit:
            return None
        if place(made).num_bytes(Home.HOST) <= self._host_room:
            return made
        sizes = self._sizes(placement)
        some = fewest_copies(self._placements.movable(placement), sizes.weights - room) or []
        made = weight_schedule.only_while_used(layout, [weight.index for weight in some])
        addresses = place(made)
        within = addresses.num_bytes(Home.HOST) <= self._host_room
        return made if within and addresses.num_bytes(Home.DEVICE) <= room + sizes.rest else None

    def _windows(self, room: int) -> list[Layout]:
        """Forced offloading of the blocks' weights: in the first placement that fits, else the smallest layout."""
        for placement in self._all:
            layout = self._window(placement, room)
            if layout is not None:
                shared = [one for one in self._placements.with_streaming(placement) if one.eighths]
                others = (self._window(one, room) for one in (shared if self._knows_rates else []))
                return [layout, *(other for other in others if other is not None)]
        return list(self._ends(room))

    def _window(self, placement: StatePlacement, room: int) -> Layout | None:
        """The layout with the blocks' weights on the device around their uses only; None if it does not fit."""
        layout = self._placements.layout(placement)
        layout = weight_schedule.window(layout, self._placements.blocks, self._request.prefetch)
        return layout if place(layout).num_bytes(Home.DEVICE) <= room else None


def spread(some: Sequence[T], number: int) -> list[T]:
    """At most ``number`` of ``some``, evenly, the last one first and the first one last."""
    if len(some) <= number:
        return list(reversed(some))
    return [some[index * (len(some) - 1) // (number - 1)] for index in reversed(range(number))]
