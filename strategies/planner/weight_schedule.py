"""Which weights are offloaded, and when they come back: a greedy start, then local search on the simulated period.

    even    turns of the first blocks with boundaries of the last ones: two integers, which are enough if blocks are
            alike. Pairs come in order of a lower bound (compute, or the time of their copies)
    issue   in order of need, each reload as early as memory allows, none before the one needed earlier
    search  drop a gap or swap two, while the period or the bytes shrink

``issue`` looks at an iteration from the middle, where backward begins, and twice: the first pass finds how late the
last reload is issued, which bounds the first one of the next iteration. In 600 small instances this was the best of all
issue vectors, and more memory never made it slower for the same gaps (40,000 budgets).

Addresses are packed from the ticks at which a weight is present. A packing may need more than the bytes alive at its
worst tick: then the choice is made again with that much less, and with twice as much less each further time; the last
resort is the plan with every gap evicted. Updates and saved tensors are left out: a weight that the CPU updates crosses
the link once per iteration whatever is decided here. ``step_cost.py`` evaluates the whole layout with all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import merge
from itertools import accumulate, islice
from math import fsum, inf
from typing import TypeAlias

from deepstow.strategies.core.facts import Facts, Rates
from deepstow.strategies.core.layout import Layout, Range, aligned, ticks_of, uses
from deepstow.strategies.core.on_disk import read_bytes
from deepstow.strategies.planner.addresses import packed
from deepstow.strategies.planner.packing import Piece
from deepstow.strategies.planner.problem import Eviction, Gap, Problem, at_need, least_memory, need_order, present_ticks
from deepstow.strategies.planner.simulate import SAME, reload_period
from deepstow.strategies.planner.step_cost import problem_of

NEAR = 4  # a gap is swapped for so many on either side of it
SEARCHED = 50  # plans that one search evaluates at most, a third of them for the start, each in O(ticks + gaps)
Gaps: TypeAlias = frozenset[Gap]
Alone: TypeAlias = tuple[Problem, list[list[int]]]
ATTEMPTS = 6  # smaller budgets that are tried when a plan cannot be packed
WINDOW = 2  # ticks that forced offloading (``weights: streamed``) fetches ahead by default

# Rates for machines whose own are unknown: they order the choices and are never shown. An H100 over PCIe 5.
ASSUMED = Rates(
    gemm_fp32_flops_per_s=5e13,
    gemm_bf16_flops_per_s=6e14,
    up_bytes_per_s=5e10,
    down_bytes_per_s=5e10,
    duplex_factor=0.8,
    link_latency_s=1e-5,
    dram_bytes_per_s=3e11,
    update_fp32_params_per_s=5e9,
    update_bf16_params_per_s=5e9,
    device_bytes_per_s=3e12,
    origin="assumed",
)


class DoesNotFit(Exception):
    """No plan is within the budget; the message says how many bytes are missing."""


def fitted(layout: Layout, weights: Alone, room: int, ahead: int | None, searched: int = SEARCHED) -> Layout:
    """``layout`` with as many of ``weights`` offloaded as it takes for all of them to fit ``room``.

    Args:
        weights: as from ``alone``.
        ahead: weights come at most so many ticks before their use; None: as early as there is room.
        searched: plans among which the search takes the best one.

    Raises:
        DoesNotFit: no plan fits.
    """
    problem, groups = weights
    if sum(weight.num_bytes for weight in problem.weights) <= room:
        return layout
    budget, excess = room, 0
    for attempt in range(ATTEMPTS + 1):
        try:
            found = choose(replace(problem, budget=budget), searched) if attempt < ATTEMPTS else at_need(problem.gaps)
        except DoesNotFit:
            found = at_need(problem.gaps)
        there = [resident_ticks(one, layout.num_ticks) for one in present_ticks(problem, _capped(found, ahead))]
        excess = _num_bytes(problem, there) - room
        if excess <= 0:
            buckets = list(layout.buckets)
            for group, ticks in zip(groups, there, strict=True):
                for index in group if ticks else ():
                    buckets[index] = replace(buckets[index], resident_ticks=ticks)
            return replace(layout, buckets=tuple(buckets))
        budget -= excess << attempt
    raise DoesNotFit(f"the smallest plan needs {excess} bytes more than there are")


def only_while_used(layout: Layout, indices: Collection[int], ahead: int = 0) -> Layout:
    """``layout`` with these weights on the device only from ``ahead`` ticks before each use to its end."""
    ticks, count, buckets = ticks_of(layout.units), layout.num_ticks, list(layout.buckets)
    for index in indices:
        present = {(tick - early) % count for tick in uses(buckets[index], ticks) for early in range(ahead + 1)}
        buckets[index] = replace(buckets[index], resident_ticks=resident_ticks(present, count))
    return replace(layout, buckets=tuple(buckets))


def resident_ticks(present: Collection[int], count: int) -> tuple[Range, ...]:
    """``present`` as ``Bucket.resident_ticks``: half-open ranges, ascending; empty if it is all of ``count`` ticks."""
    starts = [tick for tick in sorted(present) if tick - 1 not in present]
    ends = [tick + 1 for tick in sorted(present) if tick + 1 not in present]
    return () if len(present) == count else tuple(zip(starts, ends, strict=True))


@lru_cache(maxsize=1024)  # a search asks for many placements whose weights are the same
def choose(problem: Problem, searched: int = SEARCHED) -> tuple[Eviction, ...]:
    """The best of so many plans.

    Raises:
        DoesNotFit: no plan is within the budget.
    """
    least = least_memory(problem, problem.gaps)
    worst = max(range(len(least)), key=least.__getitem__)
    if least[worst] > problem.budget:
        missing = least[worst] - problem.budget
        raise DoesNotFit(f"{problem.ticks[worst].name} needs {missing} bytes more than there are")
    return _Search(problem, searched).found()


def issue(problem: Problem, gaps: Iterable[Gap]) -> tuple[Eviction, ...] | None:
    """Reloads as early as memory allows, in order of need; None if evicting in ``gaps`` is not enough."""
    count, budget = len(problem.ticks), problem.budget
    middle = count // 2
    in_order = need_order(problem, gaps)
    start = next((i for i, gap in enumerate(in_order) if gap.before % count >= middle), 0)
    order = in_order[start:] + in_order[:start]
    least = least_memory(problem, order)
    if max(least) > budget:
        return None
    earliest = first = -2 * count
    for _ in range(2):
        # From the middle on; ticks before it are negative, as they are counted from the end. No gap is longer than all.
        used, last, found = least[middle:] + least[:middle], earliest, list[Eviction]()
        for gap in order:
            need = (gap.before - middle) % count
            bound = max(last, need - (gap.before - gap.after) + 1)
            size, at = problem.weights[gap.weight].num_bytes, need
            room = budget - size
            while at > bound and used[at - 1] <= room:
                at -= 1
                used[at] += size
            first, last = (first if found else at), at
            found.append(Eviction(gap, gap.before - need + at))
        earliest = last - count
        if earliest <= first:
            break  # it bounds no reload
    return tuple(found)


def alone(facts: Facts, layout: Layout, indices: Collection[int]) -> Alone:
    """The search's problem of the weights of the buckets ``indices``, without updates, and the buckets that each of its
    weights stands for: those with the same units.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    for index in sorted(indices):
        together.setdefault(layout.buckets[index].units, []).append(index)
    groups = list(together.values())
    few = replace(layout, buckets=tuple(layout.buckets[group[0]] for group in groups), accumulation=1)
    whole = problem_of(facts, few, facts.machine.rates or ASSUMED, updates=False)
    sizes = [sum(aligned(layout.buckets[index].weight_bytes) for index in group) for group in groups]
    disk = [sum(read_bytes(layout.buckets[index]) for index in group) for group in groups]
    copies = [
        sum(layout.buckets[index].copy_bytes for index in group) if layout.buckets[group[0]].frozen_as else None
        for group in groups
    ]
    weights = tuple(
        replace(one, num_bytes=size, disk_bytes=read, copy_bytes=copied)
        for one, size, read, copied in zip(whole.weights, sizes, disk, copies, strict=True)
    )
    return replace(whole, weights=weights), groups


def _capped(evictions: Sequence[Eviction], ahead: int | None) -> tuple[Eviction, ...]:
    """No reload earlier than ``ahead`` ticks before its use; coming later than planned never needs more memory."""
    if ahead is None:
        return tuple(evictions)
    return tuple(Eviction(gap, max(issue, gap.before - ahead)) for gap, issue in evictions)


def _num_bytes(problem: Problem, there: Sequence[tuple[Range, ...]]) -> int:
    """Device bytes of the weights, which are all that may be offloaded: resident, or packed."""
    pairs = [(weight.num_bytes, ticks) for weight, ticks in zip(problem.weights, there, strict=True)]
    packing = packed(tuple([Piece(size, ticks) for size, ticks in pairs if ticks]))
    return sum(size for size, ticks in pairs if not ticks) + packing.arena


class _Search:
    """Plans of one problem, each evaluated once; ``best`` has the least period, then the fewest bytes that move."""

    def __init__(self, problem: Problem, searched: int) -> None:
        self._problem, self._searched, self._evaluated = problem, searched, 0
        self._tried: set[Gaps] = set()
        self._best, self._cost, self._found = frozenset[Gap](), (inf, 0), tuple[Eviction, ...]()
        self._up = [problem.seconds_of(weight, weight.shards * weight.link_bytes) for weight in problem.weights]
        self._index = {gap: index for index, gap in enumerate(problem.gaps)}

    def found(self) -> tuple[Eviction, ...]:
        """The best plan."""
        self._try_even()
        while not self._is_done and self._improve():
            pass
        assert self._cost[0] < inf
        return self._found

    @property
    def _is_done(self) -> bool:
        """Whether the best plan is optimal, as compute waits for nothing, or enough has been evaluated."""
        optimal = self._cost[0] <= self._problem.compute_seconds * (1 + SAME)
        return optimal or self._evaluated >= self._searched

    def _try(self, gaps: Gaps) -> bool:
        """Evaluate ``gaps``; whether they are the best so far. Not if they do not fit or are certainly slower."""
        if gaps in self._tried or self._bound(fsum(self._up[gap.weight] for gap in gaps)) > self._cost[0]:
            return False
        evictions = issue(self._problem, gaps)
        self._tried.add(gaps)
        if evictions is None:
            return False
        self._evaluated += 1
        moved = sum(self._problem.weights[gap.weight].num_bytes for gap in gaps)
        new = (reload_period(self._problem, evictions), moved)
        least, bytes_of_best = self._cost
        better = new[0] < least * (1 - SAME) or (new[0] <= least * (1 + SAME) and new[1] < bytes_of_best)
        if better:
            self._best, self._cost, self._found = gaps, new, evictions
        return better

    def _bound(self, copies: float) -> float:
        """A lower bound on the period of any plan whose copies take so many seconds."""
        return max(self._problem.compute_seconds, copies) * (1 - SAME)

    def _try_even(self) -> None:
        """Turns of the first blocks with boundaries of the last ones, until no pair can be better."""
        count, rank = len(self._problem.ticks), self._problem.rank
        gaps = self._problem.gaps
        turns = sorted((g for g in gaps if g.before < count), key=lambda g: (g.after, rank[g.weight]))
        ends = sorted((g for g in gaps if g.before >= count), key=lambda g: (-g.before, rank[g.weight]))
        for bound, _, number, more in self._pairs(turns, ends):
            if self._is_done or bound >= self._cost[0] or self._evaluated >= self._searched // 3:
                return
            self._try(frozenset((*turns[:number], *ends[:more])))

    def _pairs(self, turns: list[Gap], ends: list[Gap]) -> Iterator[tuple[float, int, int, int]]:
        """Numbers of turns and of ends that fit together, by their lower bound. There are as many as the square of the
        blocks, so a pair is made when it is its turn.
        """
        ups = [list(accumulate((self._up[gap.weight] for gap in some), initial=0.0)) for some in (turns, ends)]

        def rising(number: int, least: int) -> Iterator[tuple[float, int, int, int]]:
            for more in range(least, len(ends) + 1):
                yield self._bound(ups[0][number] + ups[1][more]), number + more, number, more

        least, some, used = len(ends), [], least_memory(self._problem, ends)
        for number in range(len(turns) + 1):
            if number:
                self._add(used, turns[number - 1], -1)
            while least >= 0 and max(used) <= self._problem.budget:
                least -= 1  # it fits; try with one boundary less
                if least >= 0:
                    self._add(used, ends[least], 1)
            some.append(rising(number, least + 1))
        yield from merge(*some)

    def _add(self, used: list[int], gap: Gap, sign: int) -> None:
        """Add the bytes of the weight of ``gap``, or take them away, at the ticks of the gap."""
        size = sign * self._problem.weights[gap.weight].num_bytes
        for tick in range(gap.after + 1, gap.before):
            used[tick % len(used)] += size

    def _improve(self) -> bool:
        """Move to a better plan near the best one; whether there is one."""
        copies = fsum(self._up[gap.weight] for gap in self._best)
        for out, into in self._moves():
            change = sum(self._up[gap.weight] for gap in into) - self._up[out.weight]
            if self._bound(copies + change) <= self._cost[0] and self._try(self._best.difference([out]).union(into)):
                return True
            if self._evaluated >= self._searched:
                break
        return False

    def _moves(self) -> Iterator[tuple[Gap, list[Gap]]]:
        """The gap of the best plan that is dropped, and the one that takes its place, if any, where that fits."""
        gaps, inside = self._best, [gap for gap in self._problem.gaps if gap in self._best]
        used = least_memory(self._problem, inside)
        short = {gap: self._short(used, gap) for gap in inside}
        yield from ((gap, []) for gap in inside if not short[gap])
        for gap in inside:
            yield from ((gap, [other]) for other in self._near(gap, gaps) if self._covers(other, short[gap]))

    def _short(self, used: list[int], gap: Gap) -> dict[int, int]:
        """The bytes that are missing without ``gap``, by tick."""
        count, over = len(used), self._problem.weights[gap.weight].num_bytes - self._problem.budget
        there = (tick % count for tick in range(gap.after + 1, gap.before))
        return {tick: used[tick] + over for tick in there if used[tick] + over > 0}

    def _covers(self, gap: Gap, short: dict[int, int]) -> bool:
        """Whether a weight that leaves in ``gap`` frees what is missing."""
        length, count = gap.before - gap.after - 1, len(self._problem.ticks)
        enough = max(short.values(), default=0) <= self._problem.weights[gap.weight].num_bytes
        return enough and all((tick - gap.after - 1) % count < length for tick in short)

    def _near(self, gap: Gap, gaps: Gaps) -> list[Gap]:
        """Gaps outside of ``gaps`` that begin about when ``gap`` does."""
        at, every = self._index[gap], self._problem.gaps
        before = (every[index] for index in reversed(range(at)) if every[index] not in gaps)
        after = (every[index] for index in range(at + 1, len(every)) if every[index] not in gaps)
        return [*islice(before, NEAR), *islice(after, NEAR)]
