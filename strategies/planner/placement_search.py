"""The placement search: use the device first, and offload only the excess, unless offloading more is faster.

The first state placement (``state_placement.py``) that fits as it is moves the least. Others may be faster: fewer
states on the host with offloaded weights instead (``weight_schedule.py``), or updates shared between the CPU and the
link. Those are ranked by an estimate (``estimate.py``) over a sample of all placements. The best of ``TRIED``
placements from first to last are worked out and simulated, then the neighbours of the fastest; the fastest is taken if
it saves more than ``GAIN``. Without known rates: the first that fits, or the last one with offloaded weights.

Refused: budgets that nothing fits into; the message says which budget would be enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from strategies.core.facts import Facts, Home
from strategies.core.layout import Layout
from strategies.core.protocol import MemoryRefusal, Refusal
from strategies.core.sizes import human, written
from strategies.planner import weight_schedule
from strategies.planner.addresses import place
from strategies.planner.estimate import estimate
from strategies.planner.greedy import DoesNotFit
from strategies.planner.state_placement import OffloadRequest, StatePlacement, StatePlacements
from strategies.planner.step_cost import cost_of

ESTIMATED = 24  # placements that are estimated, each with several shares of streamed updates
TRIED = 4  # of those, placements that are simulated
GAIN = 0.02  # what a layout must save to be taken: less is within what the simulator does not know
KEY = "strategies.offload"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A placement, the device bytes left for its offloadable weights, and the estimated seconds of a step."""

    placement: StatePlacement
    room: int
    seconds: float


class PlacementSearch:
    """One search. The budgets less what forward saves are what the arenas may take.

    Args:
        saved_bytes: kept on the device for backward; ``hosted_bytes`` on the host.
    """

    def __init__(self, facts: Facts, request: OffloadRequest, saved_bytes: int, hosted_bytes: int = 0) -> None:
        self._facts, self._request = facts, request
        self._saved_bytes, self._hosted_bytes = saved_bytes, hosted_bytes
        self._room = {Home.DEVICE: request.device_bytes - saved_bytes, Home.HOST: request.host_bytes - hosted_bytes}
        self._placements = StatePlacements(facts, request)
        self._all = self._placements.all()
        self._knows_rates = facts.machine.rates is not None and facts.run.forward_flops > 0
        self._costs: dict[int, tuple[Layout, float]] = {}  # by identity: comparing layouts costs as much as simulating

    def best(self) -> Layout:
        """The layout with the fastest simulated step.

        Raises:
            Refusal: nothing fits.
        """
        fitting = self._streamed() if self._request.weights == "streamed" else self._fitting()
        if not fitting:
            raise self._no_device()
        hosted = [place(layout).num_bytes(Home.HOST) for layout in fitting]
        within = [layout for layout, size in zip(fitting, hosted, strict=True) if size <= self._room[Home.HOST]]
        if not within:
            raise self._no_host(min(hosted))
        seconds = [self._seconds(layout) for layout in within]
        best = min(range(len(within)), key=seconds.__getitem__)
        return within[best] if seconds[best] < seconds[0] * (1 - GAIN) else within[0]

    def estimated(self, *, sure: bool = True) -> float | None:
        """The estimated seconds per step of the best layout; None if the machine's rates are unknown.

        Args:
            sure: only layouts that fit. Otherwise it may turn out not to fit, and the answer comes in milliseconds.

        Raises:
            Refusal: nothing fits.
        """
        if not self._knows_rates:
            return None
        for candidate in self._ranked(self._all, ESTIMATED // 2):
            if not sure or self._request.weights == "streamed" or self._worked_out(candidate) is not None:
                return candidate.seconds
        raise self._no_device()

    def _seconds(self, layout: Layout) -> float:
        """Simulated, once for each layout; 0 if the rates are unknown."""
        rates = self._facts.machine.rates
        if rates is None or not self._knows_rates:
            return 0.0
        if id(layout) not in self._costs:
            self._costs[id(layout)] = (layout, cost_of(self._facts, layout, rates).seconds)
        return self._costs[id(layout)][1]

    def _fitting(self) -> list[Layout]:
        """The first placement that fits as it is, and layouts with offloaded weights or streamed updates."""
        fits = (sum(self._placements.sizes(placement)) <= self._room[Home.DEVICE] for placement in self._all)
        first = next((index for index, fit in enumerate(fits) if fit), None)
        if first is None:
            return self._others(self._all)
        layout = self._placements.layout(self._all[first])
        return [layout, *self._others(self._all[: first + 1])] if self._knows_rates else [layout]

    def _others(self, placements: Sequence[StatePlacement]) -> list[Layout]:
        """Layouts of these placements with offloaded weights or streamed updates."""
        if not self._knows_rates:
            ends = map(self._candidate, (placements[-1], placements[0]))
            return list(islice(self._all_worked_out(ends), 1))
        ranked = self._ranked(placements)
        made = {one.placement: layout for one in self._starts(ranked) if (layout := self._worked_out(one)) is not None}
        if not made:
            return list(islice(self._all_worked_out(ranked), 1))
        best = min(made, key=lambda placement: self._seconds(made[placement]))
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

    def _ranked(self, placements: Sequence[StatePlacement], number: int = ESTIMATED) -> list[_Candidate]:
        """Candidates that may fit, from ``number`` of the placements, the fastest by estimate first."""
        some = (p for placement in spread(placements, number) for p in self._placements.with_streaming(placement))
        fitting = (
            candidate
            for candidate in map(self._candidate, some)
            if candidate.room > 0 and self._placements.largest_unit(candidate.placement) <= candidate.room
        )
        return sorted(fitting, key=lambda candidate: candidate.seconds)

    def _candidate(self, placement: StatePlacement) -> _Candidate:
        weights, rest = self._placements.sizes(placement)
        room = self._room[Home.DEVICE] - rest
        if not self._knows_rates:
            return _Candidate(placement, room, 0.0)
        away = weights if self._request.weights == "streamed" else max(0, weights - room)
        placed = self._placements.placed(placement)
        return _Candidate(placement, room, estimate(self._facts, placed, away, in_backward=self._request.in_backward))

    def _all_worked_out(self, candidates: Iterable[_Candidate]) -> Iterator[Layout]:
        return (layout for layout in map(self._worked_out, candidates) if layout is not None)

    def _worked_out(self, candidate: _Candidate) -> Layout | None:
        """The candidate's layout; None if it turns out not to fit."""
        placement, room = candidate.placement, candidate.room
        layout, indices = self._placements.layout(placement), self._placements.offloadable(placement)
        try:
            return weight_schedule.fitted(self._facts, layout, indices, room, self._request.prefetch)
        except DoesNotFit:
            return None

    def _streamed(self) -> list[Layout]:
        """Forced offloading of the blocks' weights: in the first placement that fits, else the smallest layout."""
        for placement in self._all:
            layout = self._windowed(placement)
            if layout is not None:
                shared = [one for one in self._placements.with_streaming(placement) if one.eighths]
                others = map(self._windowed, shared if self._knows_rates else [])
                return [layout, *(other for other in others if other is not None)]
        return list(self._all_worked_out(map(self._candidate, (self._all[-1], self._all[0]))))

    def _windowed(self, placement: StatePlacement) -> Layout | None:
        """The layout with the blocks' weights on the device around their uses only; None if it does not fit."""
        layout = self._placements.layout(placement)
        layout = weight_schedule.window(layout, self._placements.blocks, self._request.prefetch)
        return layout if place(layout).num_bytes(Home.DEVICE) <= self._room[Home.DEVICE] else None

    def _least(self, placement: StatePlacement) -> int:
        """Device bytes of the placement with as many weights offloaded as possible."""
        layout, indices = self._placements.layout(placement), self._placements.offloadable(placement)
        return self._placements.sizes(placement)[1] + weight_schedule.least(self._facts, layout, indices)

    def _no_device(self) -> Refusal:
        smallest = self._saved_bytes + min(map(self._least, (self._all[0], self._all[-1])))
        budget = self._request.device_bytes
        cure = (
            f"{human(smallest)} are needed, {human(self._saved_bytes)} of them for what forward saves, with everything "
            f"on the host that may be there: {human(smallest - budget)} too much for {human(budget)}; write "
            f"{written(smallest)} or more, or a smaller training.per_device_train_batch_size{self._forced()}"
        )
        key, value = f"{KEY}.gpu_memory", self._request.gpu_memory
        return MemoryRefusal(key, value, cure, home=Home.DEVICE, needed=smallest, budget=budget)

    def _no_host(self, smallest: int) -> Refusal:
        hosted, budget = self._hosted_bytes, self._request.host_bytes
        needed = hosted + smallest
        part = f", {human(hosted)} of them for tensors that wait for backward" if hosted else ""
        cure = (
            f"{human(needed)} of host memory are needed{part}: {human(needed - budget)} too much for {human(budget)}; "
            f"write {written(needed)} or more if the machine has it, or a larger gpu_memory{self._forced()}"
        )
        key, value = f"{KEY}.host_memory", self._request.host_memory
        return MemoryRefusal(key, value, cure, home=Home.HOST, needed=needed, budget=budget)

    def _forced(self) -> str:
        names = [name for name in ("site", "weights", "gradients") if getattr(self._request, name) != "auto"]
        return "".join(f", or leave {KEY}.{name} at auto" for name in names)


def spread(placements: Sequence[StatePlacement], number: int) -> list[StatePlacement]:
    """At most ``number`` of ``placements``, evenly, the last one first and the first one last."""
    if len(placements) <= number:
        return list(reversed(placements))
    return [placements[index * (len(placements) - 1) // (number - 1)] for index in reversed(range(number))]
