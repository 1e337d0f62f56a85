"""The placement rule: use the device first, and move no more than is too much, unless moving more is faster.

The first frame (``state_placement.py``) that fits as it is moves the least. Others may be faster: fewer states on the
host with weights that travel instead (``weight_schedule.py``), or updates shared between the CPU and the link. Those
are ranked by an estimate (``estimate.py``), for some frames spread over all. The best of ``TRIED`` frames from first to
last are worked out and simulated, then what is near the fastest; that is taken if it saves more than ``GAIN``. Without
known rates: the first that fits, or the last one with travelling weights.

Refused: budgets that nothing fits into; the message says what would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from strategies.core.facts import Facts, Home
from strategies.core.layout import Layout
from strategies.core.protocol import Refusal
from strategies.core.sizes import written
from strategies.planner import weight_schedule
from strategies.planner.addresses import arena_bytes, packed, travelling
from strategies.planner.estimate import estimate
from strategies.planner.greedy import DoesNotFit
from strategies.planner.state_placement import OffloadRequest, StatePlacement, StatePlacements
from strategies.planner.step_cost import cost_of
from strategies.report.plan_table import human

LOOKED_AT = 24  # frames that are estimated, each with several shares of streamed updates
TRIED = 4  # of those, frames that are simulated
GAIN = 0.02  # what a layout must save to be taken: less is within what the simulator does not know
KEY = "strategies.offload"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A frame, what its movable weights have on the device, and how long its step is estimated to take."""

    frame: StatePlacement
    room: int
    seconds: float


def choose(facts: Facts, wishes: OffloadRequest, saved_bytes: int, hosted_bytes: int = 0) -> Layout:
    """The layout that is simulated to be the fastest.

    Args:
        saved_bytes: kept on the device for backward; ``hosted_bytes`` on the host.

    Raises:
        Refusal: nothing fits.
    """
    return _Search(facts, wishes, wishes.device_bytes - saved_bytes).best(saved_bytes, hosted_bytes)


def quickest(facts: Facts, wishes: OffloadRequest, saved_bytes: int, *, sure: bool = True) -> float | None:
    """The estimated seconds per step of the best layout; None, where nobody knows.

    Args:
        sure: it fits. Otherwise it may turn out that it does not, and the answer comes in milliseconds.

    Raises:
        Refusal: nothing fits.
    """
    return _Search(facts, wishes, wishes.device_bytes - saved_bytes).estimated(saved_bytes, sure=sure)


class _Search:
    """One search, for ``room`` bytes on the device."""

    def __init__(self, facts: Facts, wishes: OffloadRequest, room: int) -> None:
        self._facts, self._wishes, self._room = facts, wishes, room
        self._frames = StatePlacements(facts, wishes)
        self._all = self._frames.all()
        self._knows = facts.machine.rates is not None and facts.run.forward_flops > 0
        self._priced: dict[int, tuple[Layout, float]] = {}  # by identity; to compare layouts costs as much as to price

    def best(self, saved_bytes: int, hosted_bytes: int) -> Layout:
        """The fastest layout that fits.

        Raises:
            Refusal: nothing fits.
        """
        if self._wishes.weights == "streamed":
            fitting = self._streamed()
        else:
            first = next(
                (i for i, frame in enumerate(self._all) if self._frames.sizes(frame).whole <= self._room), None
            )
            fitting = [] if first is None else [self._frames.layout(self._all[first])]
            if self._knows or first is None:
                fitting += self._others(self._all[: len(self._all) if first is None else first + 1])
        if not fitting:
            raise _no_device(self._wishes, saved_bytes + self._least(), saved_bytes)
        within = [layout for layout in fitting if hosted_bytes + _host_bytes(layout) <= self._wishes.host_bytes]
        if not within:
            raise _no_host(self._wishes, hosted_bytes + min(map(_host_bytes, fitting)), hosted_bytes)
        seconds = [self._seconds(layout) for layout in within]
        best = min(range(len(within)), key=seconds.__getitem__)
        return within[best] if seconds[best] < seconds[0] * (1 - GAIN) else within[0]

    def _seconds(self, layout: Layout) -> float:
        """Simulated, once for each layout; 0 where nobody knows the rates."""
        rates = self._facts.machine.rates
        if rates is None or not self._knows:
            return 0.0
        if id(layout) not in self._priced:
            self._priced[id(layout)] = (layout, cost_of(self._facts, layout, rates).seconds)
        return self._priced[id(layout)][1]

    def estimated(self, saved_bytes: int, *, sure: bool) -> float | None:
        """Seconds per step of the most promising candidate."""
        if not self._knows:
            return None
        for candidate in self._ranked(self._all, LOOKED_AT // 2):
            if not sure or self._wishes.weights == "streamed" or self._worked_out(candidate) is not None:
                return candidate.seconds
        raise _no_device(self._wishes, saved_bytes + self._least(), saved_bytes)

    def _others(self, frames: Sequence[StatePlacement]) -> list[Layout]:
        """Layouts of these frames with travelling weights or streamed updates."""
        if not self._knows:
            found = (self._worked_out(self._candidate(frame)) for frame in (frames[-1], frames[0]))
            return [layout for layout in found if layout is not None][:1]
        ranked = self._ranked(frames)
        made = {one.frame: layout for one in self._starts(ranked) if (layout := self._worked_out(one)) is not None}
        if not made:
            return list(islice((layout for layout in map(self._worked_out, ranked) if layout is not None), 1))
        best = min(made, key=lambda frame: self._seconds(made[frame]))
        near = [one for one in ranked if one.frame in (best.with_eighths(-1), best.with_eighths(1))]
        return [*made.values(), *(layout for layout in map(self._worked_out, near) if layout is not None)]

    def _starts(self, ranked: Sequence[_Candidate]) -> list[_Candidate]:
        """The most promising candidate, and the most promising of some frames from first to last."""
        of_frame: dict[StatePlacement, _Candidate] = {}
        for one in ranked:
            of_frame.setdefault(one.frame.plain, one)
        frames = sorted(of_frame, key=lambda frame: (frame.hosted, frame.parked))
        return list({id(one): one for one in (*ranked[:1], *(of_frame[f] for f in spread(frames, TRIED)))}.values())

    def _ranked(self, frames: Sequence[StatePlacement], number: int = LOOKED_AT) -> list[_Candidate]:
        """Candidates that may fit, of so many frames, the fastest by estimate first."""
        candidates = [self._candidate(one) for frame in spread(frames, number) for one in self._frames.shared(frame)]
        return sorted((one for one in candidates if self._may_fit(one)), key=lambda one: one.seconds)

    def _may_fit(self, one: _Candidate) -> bool:
        """Whether what travels at least leaves room for the largest unit."""
        return one.room > 0 and self._frames.largest_unit(one.frame) <= one.room

    def _candidate(self, frame: StatePlacement) -> _Candidate:
        size = self._frames.sizes(frame)
        room = self._room - size.rest
        if not self._knows:
            return _Candidate(frame, room, 0.0)
        away = size.movable if self._wishes.weights == "streamed" else max(0, size.movable - room)
        seconds = estimate(self._facts, self._frames.placed(frame), away, in_backward=self._wishes.in_backward)
        return _Candidate(frame, room, seconds)

    def _worked_out(self, candidate: _Candidate) -> Layout | None:
        """The candidate's layout; None, where it does not fit after all."""
        movable = self._frames.movable(candidate.frame)
        layout = self._frames.layout(candidate.frame)
        try:
            return weight_schedule.fitted(self._facts, layout, movable, candidate.room, self._wishes.prefetch)
        except DoesNotFit:
            return None

    def _streamed(self) -> list[Layout]:
        """Weights of blocks told to travel: in the first frame that fits, else with as little of them as can be."""
        for frame in self._all:
            layout = weight_schedule.window(self._frames.layout(frame), self._frames.blocks, self._wishes.prefetch)
            if sizes(layout)[Home.DEVICE] <= self._room:
                return [layout, *self._shared(frame)] if self._knows else [layout]
        found = self._worked_out(self._candidate(self._all[-1]))
        return [] if found is None else [found]

    def _shared(self, frame: StatePlacement) -> Iterator[Layout]:
        for one in self._frames.shared(frame):
            layout = weight_schedule.window(self._frames.layout(one), self._frames.blocks, self._wishes.prefetch)
            if one.eighths and sizes(layout)[Home.DEVICE] <= self._room:
                yield layout

    def _least(self) -> int:
        """Device bytes of the smallest layout there is."""
        of_weights = partial(weight_schedule.least, self._facts)
        return min(
            self._frames.sizes(frame).rest + of_weights(self._frames.layout(frame), self._frames.movable(frame))
            for frame in (self._all[0], self._all[-1])
        )


def _host_bytes(layout: Layout) -> int:
    return arena_bytes(layout)[Home.HOST]


def sizes(layout: Layout) -> dict[Home, int]:
    """Bytes of both arenas."""
    total = arena_bytes(layout)
    total[Home.DEVICE] += packed(travelling(layout)).arena
    return total


def spread(frames: Sequence[StatePlacement], number: int) -> list[StatePlacement]:
    """At most so many of ``frames``, evenly, the last one first and the first one last."""
    if len(frames) <= number:
        return list(reversed(frames))
    return [frames[index * (len(frames) - 1) // (number - 1)] for index in reversed(range(number))]


def _forced(wishes: OffloadRequest) -> str:
    names = [name for name in ("site", "weights", "gradients") if getattr(wishes, name) != "auto"]
    return "".join(f", or leave {KEY}.{name} at auto" for name in names)


def _no_device(wishes: OffloadRequest, smallest: int, saved_bytes: int) -> Refusal:
    cure = (
        f"{human(smallest)} are needed, {human(saved_bytes)} of them for what forward saves, with everything moved to "
        f"the host that may be: {human(smallest - wishes.device_bytes)} too much for {human(wishes.device_bytes)}; "
        f"write {written(smallest)} or more, or a smaller training.per_device_train_batch_size{_forced(wishes)}"
    )
    return Refusal(f"{KEY}.gpu_memory", wishes.gpu_memory, cure)


def _no_host(wishes: OffloadRequest, needed: int, hosted_bytes: int) -> Refusal:
    part = f", {human(hosted_bytes)} of them for what waits for backward" if hosted_bytes else ""
    cure = (
        f"{human(needed)} of host memory are needed{part}: {human(needed - wishes.host_bytes)} too much for "
        f"{human(wishes.host_bytes)}; write {written(needed)} or more if the machine has it, or a larger gpu_memory"
        f"{_forced(wishes)}"
    )
    return Refusal(f"{KEY}.host_memory", wishes.host_memory, cure)
