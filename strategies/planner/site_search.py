"""The search over sites: who updates which bucket, and where gradients wait, so that the simulated step is shortest.

It starts at mixes: a share of the bytes stays on the device, evenly spread, and a share of the rest is streamed. The
best mixes by an estimate (``estimate.py``) are worked out, and so are plans for less memory and of other buckets; then
the shares of the best mix are changed. Short climbs start at that mix with embedding or head elsewhere, since no
single move leads there, and a long one at the best of all: a run of neighbouring buckets gets another place, or two, or
exchanges its places with another run; half of the moves are of whole blocks. What the estimate finds clearly slower is
left out: it promises too much, but about as much for neighbours, so it is compared with that of the placement that is
changed. The others get their weights' schedule (``weight_schedule.py``) and are simulated, and a faster one is kept.

What a search tries is counted in buckets, so that large models do not take much longer than small ones. Moves are drawn
from the same random numbers in every search: the same budget has the same plan, and one nearby a similar one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, chain, islice, product, starmap
from math import inf
from random import Random
from typing import NamedTuple, TypeAlias

from deepstow.strategies.core.facts import Facts, Tier
from deepstow.strategies.core.layout import Layout, Site
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.estimate import Estimate
from deepstow.strategies.planner.least_memory import fewest_copies
from deepstow.strategies.planner.lower_bound import bound_of
from deepstow.strategies.planner.places import OffloadRequest, Placement, Places, Sizes
from deepstow.strategies.planner.problem import Tick
from deepstow.strategies.planner.simulate import simulated_period
from deepstow.strategies.planner.spill import off_disk, spilled
from deepstow.strategies.planner.step_cost import evictions_of, problem_of, seconds_of, ticks_of_units
from deepstow.strategies.planner.weight_schedule import (
    SEARCHED,
    WINDOW,
    Alone,
    DoesNotFit,
    alone,
    fitted,
    only_while_used,
)

EFFORT = 2000  # buckets in all plans of a climb that gains nothing
MOST_TRIED = 60  # its plans, of few buckets
SLOWER = 1.06  # times what a move starts from, or its estimate: what is estimated to take longer is not worked out
FEW = 12  # weight schedules that are compared to rank a placement
MOVES = 20  # drawn for each that is worked out, at most
SMALL = 100  # buckets below one in so many of the largest stay where a mix has them: their moves change little
LONGEST = 4  # at most one in so many of the buckets, or blocks, move together
SHARES = 64  # parts that a mix counts in
SHORT = 4  # times as many moves in a row may gain nothing on the long climb as on a short one
STARTS = 12  # mixes that are worked out, the best by the estimate
QUICK = 3  # for a comparison
CLOSE = 0.01  # relatively above the lower bound: nothing better is looked for
SAME = 1e-6  # a relative gain that is not worth a move
WORTH = 1e-3  # one for which a climb goes on as long again
Measure: TypeAlias = Callable[[Placement], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """A layout, the placement that it was made from, and the simulated seconds of its step."""

    layout: Layout
    seconds: float
    places: Places
    placement: Placement


class SiteSearch:
    """Layouts of ``places`` within a budget; for all but ``worked_out`` the machine's rates must be known.

    Args:
        host_room: bytes that the arena on the host may have.
    """

    def __init__(self, facts: Facts, request: OffloadRequest, places: Places, host_room: int) -> None:
        self._facts, self._request, self.places, self._host_room = facts, request, places, host_room
        self._mixed, self.bound = Mixer(places).placement, cache(self._bound)
        self._spilled = cache(lambda placement: spilled(places, placement, host_room))
        self._weights_alone: dict[object, Alone] = {}  # by those that may leave, to the disk or not

    def worked_out(self, placement: Placement, device_room: int, searched: int = SEARCHED) -> Layout | None:
        """The layout of ``placement`` with as many weights offloaded as it takes; None if it does not fit."""
        placement = self._spilled(placement)
        sizes = self.places.sizes(placement)
        made = self._scheduled(placement, sizes, device_room, searched)
        surely = sizes.host + sizes.copies <= self._host_room
        if made is None or surely or place(made).num_bytes(Tier.HOST) <= self._host_room:
            return made if made is None else off_disk(made, self._host_room)
        some = fewest_copies(self.places.movable(placement), sizes.weights - sizes.room(device_room)) or []
        made = only_while_used(self.places.layout(placement), [weight.index for weight in some])
        needed = place(made)
        fits = needed.num_bytes(Tier.HOST) <= self._host_room and needed.num_bytes(Tier.DEVICE) <= device_room
        return off_disk(made, self._host_room) if fits else None

    def timed(self, placement: Placement, device_room: int) -> Timed | None:
        """``worked_out``, simulated."""
        layout = self.worked_out(placement, device_room)
        return None if layout is None else Timed(layout, self.seconds(layout), self.places, placement)

    def seconds(self, layout: Layout) -> float:
        """The simulated seconds of a step."""
        assert self._facts.machine.rates is not None
        return seconds_of(self._facts, layout, self._facts.machine.rates)

    def fastest(self, device_room: int, near: Sequence[Timed] = (), effort: float = 1) -> Timed | None:
        """The fastest layout that is found.

        Args:
            near: plans for less memory, or of other buckets.
            effort: in parts of the usual one.
        """
        measures = partial(self._estimated, device_room), partial(self._simulated, device_room)
        walk = _Walk(self.places, self._mixed, *measures, enough=self.bound(device_room) * (1 + CLOSE))
        as_it_is = (one for one in self.places.ladder() if self.places.sizes(one).device <= device_room)
        for placement in (*islice(as_it_is, 1), *(self.places.like(one.places, one.placement) for one in near)):
            walk.consider(placement)
        most = int(effort * min(MOST_TRIED, EFFORT / len(self.places.buckets)))
        others = walk.start(int(effort * STARTS), most)
        random = Random(0)
        for placement in dict.fromkeys(others) if effort == 1 else ():
            walk.climb(placement, random, most // SHORT)
        if walk.best is not None:
            walk.climb(walk.best, random, most)
        return None if walk.best is None else self.timed(walk.best, device_room)

    def quick(self, device_room: int) -> Timed | None:
        """The fastest of a few mixes."""
        some = (self._mixed(mix) for _, mix in self._ranked(device_room)[:QUICK])
        best = min(some, key=partial(self._simulated, device_room), default=None)
        return None if best is None else self.timed(best, device_room)

    def estimated(self, device_room: int) -> float | None:
        """The estimated seconds of the best mix; None if none may fit. It may turn out not to fit."""
        return next((seconds for seconds, _ in self._ranked(device_room)), None)

    def _ranked(self, device_room: int) -> list[tuple[float, Mix]]:
        """Mixes that may fit, the best by the estimate first."""
        some = starmap(Mix, product(range(0, SHARES + 1, SHARES // 16), range(0, SHARES + 1, SHARES // 4), [SHARES]))
        timed = ((self._estimated(device_room, self._mixed(mix)), mix) for mix in some)
        return sorted((seconds, mix) for seconds, mix in timed if seconds < inf)

    def _estimated(self, device_room: int, placement: Placement) -> float:
        """Seconds; infinite if the placement certainly does not fit."""
        placement = self._spilled(placement)
        sizes = self.places.sizes(placement)
        away = sizes.weights if self._request.weights == "streamed" else sizes.weights - sizes.room(device_room)
        fits = sizes.host <= self._host_room and sizes.largest_unit <= sizes.room(device_room)
        return self._estimate.seconds(placement, max(0, away)) if fits else inf

    def _simulated(self, device_room: int, placement: Placement) -> float:
        """Seconds, of as few iterations as are enough to rank plans; infinite if the placement does not fit."""
        layout, rates = self.worked_out(placement, device_room, FEW), self._facts.machine.rates
        if layout is None or rates is None:
            return inf
        iterations = 3 if self._request.in_backward else 2
        problem = problem_of(self._facts, layout, rates, ticks=self._ticks)
        return simulated_period(problem, list(evictions_of(problem, layout)), iterations, after=0)

    @cached_property
    def _ticks(self) -> tuple[Tick, ...]:
        assert self._facts.machine.rates is not None
        return ticks_of_units(self._facts, self._facts.machine.rates)

    @cached_property
    def _estimate(self) -> Estimate:
        return Estimate(self._facts, self._request, self.places)

    def _bound(self, device_room: int) -> float:
        """Seconds that no layout within the budget takes less than."""
        return bound_of(self._facts, self._request, self.places, self._estimate, device_room)

    def _scheduled(self, placement: Placement, sizes: Sizes, device_room: int, searched: int) -> Layout | None:
        """``placement`` with the ticks at which weights are on the device; None if they do not fit there."""
        places, room, layout = self.places, sizes.room(device_room), self.places.layout(placement)
        if sizes.host > self._host_room or room < sizes.largest_unit:
            return None
        if self._request.weights == "streamed":
            ahead = WINDOW if self._request.prefetch is None else self._request.prefetch
            made = only_while_used(layout, places.blocks, ahead)
            if place(made).num_bytes(Tier.DEVICE) <= device_room:
                return made
        try:
            may_leave = places.offloadable(placement)
            key = tuple((index, layout.buckets[index].weight_on_disk) for index in may_leave)
            known = self._weights_alone.get(key) or alone(self._facts, layout, may_leave)
            if not layout.common_host:  # there it depends on the sites as well
                self._weights_alone[key] = known
            return fitted(layout, known, room, self._request.prefetch, searched)
        except DoesNotFit:
            return None


class _Walk:
    """One search at one budget: the best placement so far, and what has been simulated."""

    def __init__(
        self, places: Places, mixed: Callable[[Mix], Placement], estimate: Measure, simulate: Measure, enough: float
    ) -> None:
        self._places, self._mixed, self._estimate, self._simulate = places, mixed, estimate, simulate
        self._enough = enough  # seconds at which nothing more is simulated
        some = [index for index, choices in enumerate(places.choices) if len(choices) > 1]
        least = max((bucket.weight_bytes for bucket in places.buckets), default=0) / SMALL
        self._open = [index for index in some if places.buckets[index].weight_bytes >= least] or some
        blocks: dict[tuple[str, ...], list[int]] = {}
        for index in self._open:
            blocks.setdefault(places.buckets[index].units, []).append(index)
        self._groups = [[[index] for index in self._open], list(blocks.values())]  # that move as one
        self._kinds = list(dict.fromkeys(place for choices in places.choices for place in choices))
        self._times: dict[Placement, float] = {}
        self.best: Placement | None = None
        self._seconds = inf

    def consider(self, placement: Placement) -> None:
        """Simulate ``placement``, once, and keep it if it is the best so far; nothing after one that is enough."""
        if placement not in self._times and self._seconds > self._enough:
            self._times[placement] = seconds = self._simulate(placement)
            if seconds < self._seconds * (1 - SAME):
                self.best, self._seconds = placement, seconds

    def start(self, starts: int, most: int) -> Iterator[Placement]:
        """Consider mixes: so many that are best by the estimate, and at most ``most`` near the best of them. The same
        with other ends is where further climbs may start.
        """

        def estimate(mix: Mix) -> float:
            return self._estimate(self._mixed(mix))

        def time(mix: Mix) -> float:
            """Infinite if it does not fit, or the estimate finds it slower than the best so far."""
            placement = self._mixed(mix)
            if len(self._times) < starts + most and self._estimate(placement) <= SLOWER * self._seconds:
                self.consider(placement)
            return self._times.get(placement, inf)

        found = dict[Mix, float]()
        small = [False] if estimate(Mix(0, SHARES, SHARES)) < inf else [False, True]  # state of all may visit, or not
        for seed in starmap(Mix, product([0], range(0, SHARES + 1, SHARES // 8), [0, SHARES], range(3), small)):
            fits = _descended(seed, estimate, SHARES // 4, ["stays"])
            found[fits] = estimate(fits)
        for mix in sorted(found, key=found.__getitem__)[:starts]:
            time(mix)
        best = min(found, key=lambda mix: self._times.get(self._mixed(mix), inf))
        if time(best) < inf:
            _descended(best, time, SHARES // 8, ["stays", "streamed"])
        elsewhere = (best._replace(ends=ends) for ends in (-1, 0, 1, 2) if ends != best.ends)
        return (self._mixed(_descended(mix, estimate, SHARES // 4, ["stays"])) for mix in elsewhere)

    def climb(self, placement: Placement, random: Random, most: int) -> None:
        """Try moves from ``placement`` until ``most`` in a row gain nothing."""
        self.consider(placement)
        tried, seconds = 0, self._times.get(placement, inf)
        promised = self._estimate(placement)
        for _ in range(MOVES * most):
            if not self._open or tried >= most or seconds == inf:
                return
            moved = self._moved(placement, random)
            if moved not in self._times and self._estimate(moved) <= SLOWER * min(seconds, promised):
                tried += 1
                self.consider(moved)
            now = self._times.get(moved, inf)
            if now < seconds * (1 - SAME):
                tried = 0 if now < seconds * (1 - WORTH) else tried
                placement, seconds, promised = moved, now, self._estimate(moved)

    def _moved(self, placement: Placement, random: Random) -> Placement:
        """Another place for a run of buckets or blocks, or for each of two; or two exchange theirs. Most are short."""
        found, choices, groups = list(placement), self._places.choices, random.choice(self._groups)
        length = 1 + int(random.random() ** 3 * len(groups) / LONGEST)
        starts = (random.randrange(len(groups) - length + 1) for _ in range(2))
        runs = [list(chain(*groups[start : start + length])) for start in starts]
        if random.random() < 0.3:
            for here, there in zip(*runs, strict=False):  # blocks may have more buckets than others
                if found[there] in choices[here] and found[here] in choices[there]:
                    found[here], found[there] = found[there], found[here]
            return tuple(found)
        for run in runs[: random.choice([1, 1, 2])]:
            kind = random.choice(self._kinds)
            for index in run:
                found[index] = kind if kind in choices[index] else found[index]
        return tuple(found)


class Mix(NamedTuple):
    """Parts, in ``SHARES``: of blocks' bytes that stay on the device, of the rest that is streamed, and of gradients of
    the rest that wait on the host, each spread evenly. ``ends``: buckets, of those that cannot be streamed, that stay
    as well, from the first on; -1: the last one. ``small``: the smallest ones are streamed instead, so that their state
    visits in smaller slots.
    """

    stays: int
    streamed: int
    sent: int
    ends: int = 0
    small: bool = False

    def near(self, step: int, parts: Sequence[str]) -> list[Mix]:
        """Mixes with one of ``parts`` changed by ``step``."""
        now = ((part, getattr(self, part)) for part in parts)
        changed = ((part, to) for part, at in now for to in (at - step, at + step))
        return [self._replace(**{part: to}) for part, to in changed if 0 <= to <= SHARES]


def _descended(mix: Mix, cost: Callable[[Mix], float], step: int, parts: Sequence[str]) -> Mix:
    """The mix that changes by ``step``, then by less and less, lead to from ``mix``: each the best of those near."""
    costs = cache(cost)
    while step:
        moved = min(mix.near(step, parts), key=costs)
        mix, step = (moved, step) if costs(moved) < costs(mix) else (mix, step // 2)
    return mix


class Mixer:
    """The placements of mixes, as far as the options allow them."""

    def __init__(self, places: Places) -> None:
        self._sizes = [bucket.weight_bytes for bucket in places.buckets]
        visits = [any(choice.site is Site.STREAMED for choice in choices) for choices in places.choices]
        self._ends = [index for index, may in enumerate(visits) if not may]
        self._blocks = [index for index, may in enumerate(visits) if may] or self._ends
        self._nearest = places.nearest
        self.placement, self._split = cache(self._placement), cache(self._split_of)
        self._part = cache(lambda stays, ends, part: {*_share(self._split(stays, ends)[1], self._sizes, part)})

    def _placement(self, mix: Mix) -> Placement:
        sizes, (here, rest) = self._sizes, self._split(mix.stays, mix.ends)
        by_size = sorted(rest, key=sizes.__getitem__) if mix.small else []
        some = _first(by_size, sizes, mix.streamed) if mix.small else self._part(mix.stays, mix.ends, mix.streamed)
        streamed, sent = {*some}, self._part(mix.stays, mix.ends, mix.sent)
        sites = (Site.DEVICE if i in here else Site.STREAMED if i in streamed else Site.HOST for i in range(len(sizes)))
        tiers = (Tier.HOST if index in sent else Tier.DEVICE for index in range(len(sizes)))
        return tuple(map(self._nearest, range(len(sizes)), sites, tiers))

    def _split_of(self, stays: int, ends: int) -> tuple[set[int], list[int]]:
        """The buckets that stay on the device, and all others."""
        here = {
            *(self._ends[ends:] if ends < 0 else self._ends[:ends]),
            *_share(self._blocks, self._sizes, stays),
        }
        return here, [index for index in range(len(self._sizes)) if index not in here]


def _first(indices: Sequence[int], sizes: Sequence[int], part: int) -> Iterator[int]:
    """The first of ``indices`` that have together at most ``part`` in ``SHARES`` of the bytes."""
    total = sum(sizes[index] for index in indices)
    seen = accumulate(sizes[index] for index in indices)
    return (index for index, size in zip(indices, seen, strict=True) if size * SHARES <= part * total)


def _share(indices: Sequence[int], sizes: Sequence[int], part: int) -> Iterator[int]:
    """Those of ``indices`` that have ``part`` in ``SHARES`` of the bytes, spread evenly."""
    seen = taken = 0
    for index in indices:
        seen += sizes[index]
        if (part * seen / SHARES - taken) * 2 >= sizes[index]:
            yield index
            taken += sizes[index]
