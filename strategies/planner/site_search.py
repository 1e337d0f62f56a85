"""The search over sites: who updates which bucket, and where gradients wait, so that the simulated step is shortest.

It starts at mixes: a share of the blocks' bytes stays on the device, evenly spread, a share of the rest is streamed,
and embedding and head are anywhere. The best by an estimate (``step_cost.py``) are worked out: they get their weights'
schedule (``weight_schedule.py``) and are simulated. Then the shares of the best are changed. In other kinds of buckets
this begins at the best mix of the first kind. In the kind that is fastest by then a climb goes on: a run of
neighbouring buckets gets another place, or two runs do, or they exchange theirs. A third of the moves is of whole
blocks, and a third of embedding and head. Of a few moves the best by the estimate is simulated. The estimate promises
too much, but about as much for neighbours: what it finds slower than the placement that is changed is left out.

Last of all embedding and head may be streamed, in mixes and by themselves: so that choice never gives a slower plan.

What a search tries is counted in buckets, so that large models do not take much longer than small ones. Moves are drawn
from the same random numbers in every search: the same budget has the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, product
from math import inf
from operator import itemgetter
from random import Random
from typing import NamedTuple, TypeAlias

from deepstow.strategies.core.facts import Facts, Tier
from deepstow.strategies.core.layout import Layout, Site
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.least_memory import fewest_copies
from deepstow.strategies.planner.places import OffloadRequest, Place, Placement, Places, Sizes
from deepstow.strategies.planner.problem import Tick
from deepstow.strategies.planner.simulate import simulated_period
from deepstow.strategies.planner.spill import off_disk, spilled
from deepstow.strategies.planner.step_cost import Estimate, evictions_of, problem_of, seconds_of, ticks_of_units
from deepstow.strategies.planner.weight_schedule import WINDOW, Alone, DoesNotFit, alone, fitted, only_while_used

EFFORT = 2000  # buckets in all plans of a climb that gains nothing
MOST_TRIED, LEAST_TRIED = 60, 12  # its plans, of few buckets and of many
FEW = 96  # buckets: so little takes so little time that every kind gets a climb, and mixes of all ends
DRAWN = 8  # moves, of which the best by the estimate may be simulated
ROUNDS = 10  # draws for each plan of a climb, at most
SLOWER = 1.03  # times what is known: what is estimated to take longer is not simulated
WORTH = 1e-3  # a relative gain for which a climb goes on as long again
STARTS = 3  # mixes that are simulated, the best by the estimate, for each place of embedding and head
QUICK = 3  # for a comparison
PARTS = 64  # that a mix counts its shares in
# Where embedding, and then the head and all others are that are of no block; the first four stream nothing.
STAYING_ENDS = tuple(product((Site.HOST, Site.DEVICE), repeat=2))
ENDS = tuple(dict.fromkeys((*STAYING_ENDS, *product((Site.HOST, Site.DEVICE, Site.STREAMED), repeat=2))))
STAYING, VISITING = range(len(STAYING_ENDS)), range(len(STAYING_ENDS), len(ENDS))
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
        self._facts = facts
        self._request = request
        self.places = places
        self._host_room = host_room
        self.mixed = cache(Mixer(places).placement)
        self._spilled = cache(lambda placement: spilled(places, placement, host_room))
        self._weights_alone: dict[object, Alone] = {}  # by those that may leave, to the disk or not

    def worked_out(self, placement: Placement, device_room: int) -> Layout | None:
        """The layout of ``placement`` with as many weights offloaded as it takes; None if it does not fit."""
        placement = self._spilled(placement)
        sizes = self.places.sizes(placement)
        layout = self._scheduled(placement, sizes, device_room)
        surely = sizes.host + sizes.copies <= self._host_room
        if layout is not None and not surely and place(layout).num_bytes(Tier.HOST) > self._host_room:
            layout = self._with_fewest_copies(placement, device_room)
        return None if layout is None else off_disk(layout, self._host_room)

    def _with_fewest_copies(self, placement: Placement, device_room: int) -> Layout | None:
        """The layout of ``placement`` with as few weights offloaded as it takes; None if it does not fit."""
        sizes = self.places.sizes(placement)
        offloaded = fewest_copies(self.places.movable(placement), sizes.weights - sizes.room(device_room)) or []
        layout = only_while_used(self.places.layout(placement), [weight.index for weight in offloaded])
        addresses = place(layout)
        fits = addresses.num_bytes(Tier.HOST) <= self._host_room and addresses.num_bytes(Tier.DEVICE) <= device_room
        return layout if fits else None

    def seconds(self, layout: Layout) -> float:
        """The simulated seconds of a step."""
        assert self._facts.machine.rates is not None
        return seconds_of(self._facts, layout, self._facts.machine.rates)

    def timed(self, placement: Placement, device_room: int) -> Timed | None:
        """``worked_out``, simulated."""
        layout = self.worked_out(placement, device_room)
        return None if layout is None else Timed(layout, self.seconds(layout), self.places, placement)

    def quick(self, device_room: int) -> Timed | None:
        """The fastest of a few mixes."""
        walk = _Walk(self, device_room)
        for _, placement in self._ranked(device_room)[:QUICK]:
            walk.consider(placement)
        return walk.plan()

    def promised(self, device_room: int) -> float | None:
        """The estimated seconds of the best mix; None if none may fit. It may turn out not to fit."""
        return next((seconds for seconds, _ in self._ranked(device_room)), None)

    def _ranked(self, device_room: int) -> list[tuple[float, Placement]]:
        """A few mixes that may fit, the best by the estimate first."""
        shares = product(range(0, PARTS + 1, PARTS // 16), range(0, PARTS + 1, PARTS // 4))
        mixes = (self.mixed(Mix(stays, streamed, PARTS)) for stays, streamed in shares)
        timed = ((self.estimated(placement, device_room), placement) for placement in mixes)
        return sorted(((seconds, placement) for seconds, placement in timed if seconds < inf), key=itemgetter(0))

    def estimated(self, placement: Placement, device_room: int) -> float:
        """Seconds; infinite if the placement certainly does not fit."""
        placement = self._spilled(placement)
        sizes = self.places.sizes(placement)
        leaving = sizes.weights if self._request.weights == "streamed" else sizes.weights - sizes.room(device_room)
        fits = sizes.host <= self._host_room and sizes.largest_unit <= sizes.room(device_room)
        return self._estimate.seconds(placement, max(0, leaving)) if fits else inf

    def simulated(self, placement: Placement, device_room: int, most: float = inf) -> float:
        """Seconds, of as few iterations as are enough to rank plans, or at least so many, if they are more than
        ``most``; infinite if the placement does not fit.
        """
        layout, rates = self.worked_out(placement, device_room), self._facts.machine.rates
        if layout is None or rates is None:
            return inf
        iterations = 3 if self._request.in_backward else 2
        problem = problem_of(self._facts, layout, rates, ticks=self._ticks)
        return simulated_period(problem, list(evictions_of(problem, layout)), iterations, after=0, most=most)

    @cached_property
    def _ticks(self) -> tuple[Tick, ...]:
        assert self._facts.machine.rates is not None
        return ticks_of_units(self._facts, self._facts.machine.rates)

    @cached_property
    def _estimate(self) -> Estimate:
        return Estimate(self._facts, self._request, self.places)

    def _scheduled(self, placement: Placement, sizes: Sizes, device_room: int) -> Layout | None:
        """``placement`` with the ticks at which weights are on the device; None if they do not fit there."""
        places = self.places
        room = sizes.room(device_room)
        layout = self.places.layout(placement)
        if sizes.host > self._host_room or room < sizes.largest_unit:
            return None
        if self._request.weights == "streamed":
            ahead = WINDOW if self._request.prefetch is None else self._request.prefetch
            layout_ahead = only_while_used(layout, places.blocks, ahead)
            if place(layout_ahead).num_bytes(Tier.DEVICE) <= device_room:
                return layout_ahead
        may_leave = places.offloadable(placement)
        key = tuple((index, layout.buckets[index].weight_on_disk) for index in may_leave)
        weights_alone = self._weights_alone.get(key) or alone(self._facts, layout, may_leave)
        if not layout.common_host:  # there it depends on the sites as well
            self._weights_alone[key] = weights_alone
        try:
            return fitted(layout, weights_alone, room, self._request.prefetch)
        except DoesNotFit:
            return None


def fastest(searches: Sequence[SiteSearch], device_room: int) -> Timed | None:
    """The fastest layout that is found, of several kinds of buckets; each search starts at the mix of the first."""
    first, *others = walks = [_Walk(search, device_room) for search in searches]
    few = all(len(walk.places.buckets) <= FEW for walk in walks)
    first.mix()
    for walk in others:
        if first.best is not None:
            walk.consider(walk.places.like(first.places, first.best))
        walk.mix(first.mixed)
        walk.move_ends(walk.places.without_visiting_ends)
    for walk in walks if few else [min(walks, key=lambda walk: walk.seconds)]:
        walk.climb(walk.places.without_visiting_ends)
    best = min(walks, key=lambda walk: walk.seconds)
    plans = [best.plan()]
    if best.stream_ends():
        plans.append(best.plan())
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds, default=None)


class _Walk:
    """One search at one budget: the best placement so far, and what has been simulated."""

    def __init__(self, search: SiteSearch, device_room: int) -> None:
        self.search = search
        self.places = search.places
        self._estimate: Measure = lambda placement: search.estimated(placement, device_room)
        self._estimate_of_mix = cache(lambda mix: self._estimate(search.mixed(mix)))
        self._most = max(LEAST_TRIED, int(min(MOST_TRIED, EFFORT / len(search.places.buckets))))
        self._random = Random(0)
        self._times: dict[Placement, float] = {}
        self._room = device_room
        self.seconds = inf
        self.best: Placement | None = None
        self.mixed: Mix | None = None  # the best of them
        ladder = search.places.ladder()
        as_it_is = (placement for placement in ladder if search.places.sizes(placement).device <= device_room)
        self.consider(next(as_it_is, ladder[-1]))

    def plan(self) -> Timed | None:
        """The best so far, simulated for as many iterations as a plan's seconds are."""
        return None if self.best is None else self.search.timed(self.best, self._room)

    def consider(self, placement: Placement) -> float:
        """Simulate ``placement``, once, and keep it if it is the best so far."""
        if placement not in self._times:
            self._times[placement] = seconds = self.search.simulated(placement, self._room, self.seconds)
            if seconds < self.seconds:
                self.best = placement
                self.seconds = seconds
        return self._times[placement]

    def mix(self, near: Mix | None = None) -> None:
        """Consider the mixes that are best by the estimate, and ``near``, and those near them: so many as a climb
        tries.
        """
        most, of_ends = len(self._times) + self._most, list[list[Mix]]()
        for end in STAYING:
            seeds = [Mix(0, *shares, end) for shares in product(range(0, PARTS + 1, PARTS // 4), (0, PARTS))]
            if near is not None and near.ends != end:
                seeds = [near._replace(stays=0, ends=end)]
            of_ends.append(self._fitting(seeds))
        of_ends.sort(key=lambda starts: self._estimate_of_mix(starts[0]))
        if near is not None:
            of_ends.sort(key=lambda starts: starts[0].ends != near.ends)
            of_ends[0].append(near)
        for starts in of_ends:
            self._descend(starts, most)

    def _fitting(self, seeds: Iterable[Mix]) -> list[Mix]:
        """The best by the estimate, where as much stays as is best."""
        fits = {_descended(seed, self._estimate_of_mix, PARTS // 4, ["stays"]): None for seed in seeds}
        return sorted(fits, key=self._estimate_of_mix)[:STARTS]

    def _descend(self, starts: Sequence[Mix], most: int, *, from_best: bool = False) -> None:
        """Simulate ``starts``, and mixes near the fastest of them, until so many placements have been simulated.

        Args:
            from_best: none is near enough unless it is the best placement so far.
        """
        before = self.seconds

        def seconds(mix: Mix) -> float:
            """Infinite if the estimate finds it slower than the best so far."""
            placement = self.search.mixed(mix)
            if len(self._times) < most and self._estimate_of_mix(mix) <= SLOWER * self.seconds:
                self.consider(placement)
            simulated = self._times.get(placement, inf)
            if self.mixed is None or simulated < self._times.get(self.search.mixed(self.mixed), inf):
                self.mixed = mix
            return simulated

        best = min(starts, key=seconds)
        if seconds(best) < (before if from_best else inf):
            _descended(best, seconds, PARTS // 8, ["stays", "streamed"])

    def stream_ends(self) -> bool:
        """Stream embedding and head, or one of them, where that is faster: it is where the CPU is slow."""
        choices, before = self.places.choices, self.seconds
        if choices == self.places.without_visiting_ends:
            return False
        if self.mixed is not None:
            starts = self._fitting(self.mixed._replace(stays=0, ends=end) for end in VISITING)
            self._descend(starts, len(self._times) + self._most, from_best=True)
        self.move_ends(choices)
        if self.seconds < before * (1 - WORTH):
            self.climb(choices)
        return self.seconds < before

    def move_ends(self, choices: Sequence[Sequence[Place]]) -> None:
        """Try each other place of embedding and head."""
        for index, places in enumerate(choices):
            for at in places if index not in self.places.of_blocks else ():
                if self.best is None:
                    return
                moved = (*self.best[:index], at, *self.best[index + 1 :])
                if self._estimate(moved) <= SLOWER * self._estimate(self.best):
                    self.consider(moved)

    def climb(self, choices: Sequence[Sequence[Place]]) -> None:
        """Try moves from the best placement until so many in a row gain nothing."""
        movable = [index for index, places in enumerate(choices) if len(places) > 1]
        if self.best is None or not movable:
            return
        of_units: dict[tuple[str, ...], list[int]] = {}
        for index in movable:
            of_units.setdefault(self.places.buckets[index].units, []).append(index)
        single = [[index] for index in movable]
        ends = [group for group in single if group[0] not in self.places.of_blocks]
        groups = [grouping for grouping in (single, list(of_units.values()), ends) if grouping]  # each moves as one
        promised, tried = self._estimate(self.best), 0
        for _ in range(ROUNDS * self._most):
            draws = [_moved(self.best, choices, self._random.choice(groups), self._random) for _ in range(DRAWN)]
            estimates = {placement: self._estimate(placement) for placement in draws if placement not in self._times}
            placement = min(estimates, key=estimates.__getitem__, default=self.best)
            if estimates.get(placement, inf) > SLOWER * promised:
                continue
            before = self.seconds
            if self.consider(placement) < before:
                promised = estimates[placement]
            tried = 0 if self.seconds < before * (1 - WORTH) else tried + 1
            if tried >= self._most:
                return


def _moved(
    placement: Placement, choices: Sequence[Sequence[Place]], groups: Sequence[Sequence[int]], random: Random
) -> Placement:
    """Another place for a run of groups, or for each of two; or two exchange theirs. Most are short."""
    moved = list(placement)
    length = 1 + int(random.random() ** 3 * len(groups) / 4)
    starts = (random.randrange(len(groups) - length + 1) for _ in range(2))
    first_run, second_run = (list(chain(*groups[start : start + length])) for start in starts)
    if random.random() < 0.3:
        for bucket, other in zip(first_run, second_run, strict=False):  # blocks may have more buckets than others
            if moved[other] in choices[bucket] and moved[bucket] in choices[other]:
                moved[bucket], moved[other] = moved[other], moved[bucket]
        return tuple(moved)
    for run in (first_run, second_run)[: random.choice([1, 1, 2])]:
        to = random.choice(choices[random.choice(run)])
        for index in run:
            moved[index] = to if to in choices[index] else moved[index]
    return tuple(moved)


class Mix(NamedTuple):
    """Parts, in ``PARTS``: of blocks' bytes that stay on the device, of the rest that is streamed, and of gradients of
    the rest that wait on the host, each spread evenly. ``ends``: where embedding and head are, one of ``ENDS``.
    """

    stays: int
    streamed: int
    sent: int
    ends: int = 0


def _descended(mix: Mix, cost: Callable[[Mix], float], step: int, parts: Sequence[str]) -> Mix:
    """The mix that changes by ``step``, then by less and less, lead to from ``mix``: each the best of those near."""
    costs = cache(cost)
    while step:
        changed = ((field, getattr(mix, field) + by) for field in parts for by in (-step, step))
        near = [mix._replace(**{field: to}) for field, to in changed if 0 <= to <= PARTS]
        moved = min(near, key=costs)
        if costs(moved) < costs(mix):
            mix = moved
        else:
            step //= 2
    return mix


class Mixer:
    """The placements of mixes, as far as the options allow them."""

    def __init__(self, places: Places) -> None:
        self._sizes = [bucket.weight_bytes for bucket in places.buckets]
        movable = [index for index, choices in enumerate(places.choices) if len(choices) > 1]
        self._blocks = [index for index in movable if index in places.of_blocks] or movable
        ends = [index for index in range(len(self._sizes)) if index not in {*self._blocks}]
        self._first = ends[:1]
        self._last = ends[1:]
        self._nearest = places.nearest

    def placement(self, mix: Mix) -> Placement:
        """Where each bucket is."""
        first, last = ENDS[mix.ends]
        sites = dict.fromkeys(self._blocks, Site.HOST) | dict.fromkeys(self._first, first)
        sites |= dict.fromkeys(self._last, last) | dict.fromkeys(self._share(self._blocks, mix.stays), Site.DEVICE)
        on_host = [index for index in self._blocks if sites[index] is Site.HOST]
        sites |= dict.fromkeys(self._share(on_host, mix.streamed), Site.STREAMED)
        sent = {*self._share([index for index in sites if sites[index] is not Site.DEVICE], mix.sent)}
        tiers = (Tier.HOST if index in sent else Tier.DEVICE for index in range(len(sites)))
        return tuple(map(self._nearest, range(len(sites)), (sites[index] for index in range(len(sites))), tiers))

    def _share(self, indices: Sequence[int], part: int) -> Iterator[int]:
        """Those of ``indices`` that have ``part`` in ``PARTS`` of the bytes, spread evenly."""
        seen_bytes = taken_bytes = 0
        for index in indices:
            seen_bytes += self._sizes[index]
            if (part * seen_bytes / PARTS - taken_bytes) * 2 >= self._sizes[index]:
                yield index
                taken_bytes += self._sizes[index]
