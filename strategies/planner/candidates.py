"""Candidates: layouts of one family of state placements within a budget, the most promising ones of them worked out.

The first state placement (``state_placement.py``) that fits as it is moves the least. Others may be faster: fewer
states on the host with offloaded weights instead (``weight_schedule.py``), or updates shared between the CPU and the
link. Those are ranked by an estimate (``estimate.py``) over a sample of all placements that keep more on the device;
the best of them, and the best of ``TRIED`` placements from first to last, are worked out. Which of them is the fastest
is for the simulator to say (``placement_search.py``).

What the host has no room for is left out before it is worked out. A layout whose copies of offloaded weights turn out
not to fit there is made again with as few copies as its placement allows (``least_memory.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from strategies.core.facts import Facts, Home
from strategies.core.layout import Layout
from strategies.planner import weight_schedule
from strategies.planner.addresses import place
from strategies.planner.estimate import estimate
from strategies.planner.greedy import DoesNotFit
from strategies.planner.least_memory import fewest_copies, movable
from strategies.planner.state_placement import OffloadRequest, StatePlacement, StatePlacements

ESTIMATED = 24  # placements that are estimated, each with several shares of streamed updates
TRIED = 4  # of those, placements that are worked out


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A placement, the device bytes left for its offloadable weights, and the estimated seconds of a step."""

    placement: StatePlacement
    room: int
    seconds: float


class Candidates:
    """Layouts of the placements of one family.

    Args:
        host_room: bytes that the arena on the host may have.
        seconds: simulates a layout; None: the machine's rates are unknown.
    """

    def __init__(
        self,
        facts: Facts,
        request: OffloadRequest,
        placements: StatePlacements,
        host_room: int,
        seconds: Callable[[Layout], float] | None,
    ) -> None:
        self._facts, self._request, self._placements = facts, request, placements
        self._host_room, self._seconds = host_room, seconds
        self._all = placements.all()

    def layouts(self, device_room: int) -> list[Layout]:
        """Layouts whose arenas are within ``device_room`` and the room on the host, what moves the least first."""
        made = self._windows(device_room) if self._request.weights == "streamed" else self._fitting(device_room)
        return [layout for layout in made if place(layout).num_bytes(Home.HOST) <= self._host_room]

    def estimated(self, device_room: int, *, sure: bool) -> float | None:
        """The estimated seconds of the most promising placement; None if there is none.

        Args:
            sure: only of layouts that fit. Otherwise it may turn out not to fit, and the answer comes in milliseconds.
        """
        for candidate in self._ranked(self._all, device_room, ESTIMATED // 2):
            if not sure or self._request.weights == "streamed" or self._worked_out(candidate) is not None:
                return candidate.seconds
        return None

    def _fitting(self, room: int) -> list[Layout]:
        """The first placement that fits as it is, and layouts with offloaded weights or streamed updates."""
        fits = (self._is_within(placement, room) for placement in self._all)
        first = next((index for index, fit in enumerate(fits) if fit), None)
        if first is None:
            return self._others(self._all, room)
        layout = self._placements.layout(self._all[first])
        return [layout, *self._others(self._all[: first + 1], room)] if self._seconds else [layout]

    def _is_within(self, placement: StatePlacement, room: int) -> bool:
        """Whether the placement fits as it is, with all weights on the device."""
        sizes = self._placements.sizes(placement)
        return sizes.weights + sizes.rest <= room and sizes.host <= self._host_room

    def _others(self, placements: Sequence[StatePlacement], room: int) -> list[Layout]:
        """Layouts of these placements with offloaded weights or streamed updates."""
        if not self._seconds:
            ends = (self._candidate(placement, room) for placement in (placements[-1], placements[0]))
            return list(islice(self._all_worked_out(ends), 1))
        ranked = self._ranked(placements, room)
        made = {one.placement: layout for one in self._starts(ranked) if (layout := self._worked_out(one)) is not None}
        if not made:
            return list(islice(self._all_worked_out(ranked), 1))
        times = {placement: self._seconds(layout) for placement, layout in made.items()}
        best = min(made, key=times.__getitem__)
        beside = [replace(best, eighths=best.eighths + more) for more in (-1, 1)]
        near = [one for one in ranked if one.placement in beside]
        return [*made.values(), *self._all_worked_out(near)]

    def _starts(self, ranked: Sequence[_Candidate]) -> list[_Candidate]:
        """The most promising candidate, and the most promising one of some placements from first to last."""
        by_placement: dict[StatePlacement, _Candidate] = {}
        for one in ranked:
            by_placement.setdefault(replace(one.placement, eighths=0), one)
        placements = sorted(by_placement, key=lambda placement: (placement.hosted, placement.grads_down))
        some = (by_placement[placement] for placement in spread(placements, TRIED))
        return list({id(one): one for one in (*ranked[:1], *some)}.values())

    def _ranked(self, placements: Sequence[StatePlacement], room: int, number: int = ESTIMATED) -> list[_Candidate]:
        """Candidates that may fit, from ``number`` of the placements, the fastest by estimate first."""
        some = (p for placement in spread(placements, number) for p in self._placements.with_streaming(placement))
        within = (p for p in some if self._placements.sizes(p).host <= self._host_room)
        fitting = (
            candidate
            for candidate in (self._candidate(placement, room) for placement in within)
            if candidate.room > 0 and self._placements.largest_unit(candidate.placement) <= candidate.room
        )
        return sorted(fitting, key=lambda candidate: candidate.seconds)

    def _candidate(self, placement: StatePlacement, device_room: int) -> _Candidate:
        sizes = self._placements.sizes(placement)
        room = device_room - sizes.rest
        if not self._seconds:
            return _Candidate(placement, room, 0.0)
        away = sizes.weights if self._request.weights == "streamed" else max(0, sizes.weights - room)
        placed = self._placements.placed(placement)
        return _Candidate(placement, room, estimate(self._facts, placed, away, in_backward=self._request.in_backward))

    def _all_worked_out(self, candidates: Iterable[_Candidate]) -> Iterator[Layout]:
        return (layout for layout in map(self._worked_out, candidates) if layout is not None)

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
        excess = self._placements.sizes(placement).weights - room
        some = fewest_copies(movable(self._placements, placement), excess) or []
        made = weight_schedule.only_while_used(layout, [weight.index for weight in some])
        addresses = place(made)
        within = addresses.num_bytes(Home.HOST) <= self._host_room
        fits = addresses.num_bytes(Home.DEVICE) <= room + self._placements.sizes(placement).rest
        return made if within and fits else None

    def _windows(self, room: int) -> list[Layout]:
        """Forced offloading of the blocks' weights: in the first placement that fits, else the smallest layout."""
        for placement in self._all:
            layout = self._window(placement, room)
            if layout is not None:
                shared = [one for one in self._placements.with_streaming(placement) if one.eighths]
                others = (self._window(one, room) for one in (shared if self._seconds else []))
                return [layout, *(other for other in others if other is not None)]
        ends = (self._candidate(placement, room) for placement in (self._all[-1], self._all[0]))
        return list(self._all_worked_out(ends))

    def _window(self, placement: StatePlacement, room: int) -> Layout | None:
        """The layout with the blocks' weights on the device around their uses only; None if it does not fit."""
        layout = self._placements.layout(placement)
        layout = weight_schedule.window(layout, self._placements.blocks, self._request.prefetch)
        return layout if place(layout).num_bytes(Home.DEVICE) <= room else None


def spread(placements: Sequence[StatePlacement], number: int) -> list[StatePlacement]:
    """At most ``number`` of ``placements``, evenly, the last one first and the first one last."""
    if len(placements) <= number:
        return list(reversed(placements))
    return [placements[index * (len(placements) - 1) // (number - 1)] for index in reversed(range(number))]
