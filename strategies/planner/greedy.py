"""Which weights leave when, and when they come back: a greedy start, then local search on the simulated period.

    A  which    while a tick needs too much: of the gaps that span the worst tick, evict in the one with the longest
                idle compute; further starts order by idle compute per second of copy, and by size (smallest first)
    B  when     in order of need, issue each reload as early as memory allows, none before the one needed earlier
    C  search   drop a gap, swap two, add one, swap one for two or two for one, while the period or the bytes shrink;
                from each start of A, from the best prefix and suffix (below), and from all gaps

B looks at an iteration from the middle, where backward begins, and twice: the first pass finds how late the last reload
is issued, which bounds the first one of the next iteration. In 600 small instances this was the best of all issue
vectors, and more memory never made it slower for the same gaps (40,000 budgets); other cut points do not have this.

If blocks are alike, the best turns are a prefix of the blocks and the best boundaries a suffix: two integers. That
search is complete: candidates come in order of a lower bound (compute, or the time of their copies) and the search ends
when the bound reaches the best. For at most ``FEW`` gaps all sets of gaps are tried the same way.

Invariant. More memory or a faster link never makes the result slower: where every candidate is tried, this follows
because it holds for each candidate. Elsewhere it may; ``monotone.py`` orders the budgets of whole layouts.

Refused: budgets below what is needed with every gap evicted (``DoesNotFit``); problems with updates or saved tensors,
which ``weight_schedule.py`` leaves out.

Cost. Evaluating a plan takes O(ticks + gaps) and a little for B. A search evaluates at most ``SEARCHED`` plans, so that
a hundred blocks take well under a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from heapq import merge, nsmallest
from itertools import accumulate, combinations, islice
from math import fsum, inf
from typing import TypeAlias

from strategies.planner.problem import Eviction, Gap, Problem, least_memory, need_order
from strategies.planner.simulate import SAME, reload_period

FEW = 10  # gaps of which all sets are tried
MANY = 24  # gaps up to which one is swapped for two
NEAR = 4  # with more gaps, one is swapped for so many on either side of it
SEARCHED = 50  # plans that one search evaluates at most

Gaps: TypeAlias = frozenset[Gap]
Some: TypeAlias = tuple[Gap, ...]
Key: TypeAlias = Callable[[Gap], tuple[float, ...]]
Candidate: TypeAlias = tuple[float, int, Callable[[], Gaps]]  # lower bound of the period, number of gaps, and the gaps


class DoesNotFit(Exception):
    """No plan is within the budget; the message says how many bytes are missing."""


def choose(problem: Problem) -> tuple[Eviction, ...]:
    """The best plan that is found.

    Raises:
        DoesNotFit: no plan is within the budget.
    """
    check_fits(problem)
    few = len(problem.gaps) <= FEW
    search = Search(problem, 1 << FEW if few else SEARCHED)
    if few:
        every = (frozenset(s) for n in range(len(problem.gaps) + 1) for s in combinations(problem.gaps, n))
        candidates = ((search.bound(gaps), len(gaps), partial(_itself, gaps)) for gaps in every)
        search.try_in_order(sorted(candidates, key=_first))
    elif _is_uniform(problem):
        search.try_in_order(search.prefixes_and_suffixes())
    else:
        search.improve_all()
    return search.found()


def check_fits(problem: Problem) -> None:
    """Raise ``DoesNotFit`` unless there is a plan within the budget."""
    least = least_memory(problem, problem.gaps)
    worst = max(range(len(least)), key=least.__getitem__)
    if least[worst] > problem.budget:
        missing = least[worst] - problem.budget
        raise DoesNotFit(f"{problem.ticks[worst].name} needs {missing} bytes more than there are")


def issue(problem: Problem, gaps: Iterable[Gap]) -> tuple[Eviction, ...] | None:
    """B: reloads as early as memory allows, in order of need; None if evicting in ``gaps`` is not enough."""
    count, budget = len(problem.ticks), problem.budget
    middle = count // 2
    in_order = need_order(problem, gaps)
    start = next((i for i, gap in enumerate(in_order) if gap.before % count >= middle), 0)
    order = in_order[start:] + in_order[:start]
    least = least_memory(problem, order)
    if max(least) > budget:
        return None
    earliest = -2 * count
    for _ in range(2):
        # From the middle on; ticks before it are negative, as they are counted from the end. No gap is longer than all.
        used, last, found = least[middle:] + least[:middle], earliest, []
        for gap in order:
            need = (gap.before - middle) % count
            bound = max(last, need - (gap.before - gap.after) + 1)
            size, at = problem.weights[gap.weight].num_bytes, need
            room = budget - size
            while at > bound and used[at - 1] <= room:
                at -= 1
                used[at] += size
            found.append(Eviction(gap, gap.before - need + at))
            last = at
        earliest = last - count
    return tuple(found)


class Search:
    """Plans of one problem, each evaluated once."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit, self.evaluated = problem, limit, 0
        self._costs: dict[Gaps, tuple[float, int]] = {}
        self._up = [problem.up_seconds(weight.num_bytes) for weight in problem.weights]
        self._index = {gap: index for index, gap in enumerate(problem.gaps)}
        count = len(problem.ticks)
        self._interior = {gap: [t % count for t in range(gap.after + 1, gap.before)] for gap in problem.gaps}
        self._bits = {gap: _bits(gap, count) for gap in problem.gaps}

    def cost(self, gaps: Gaps, at_most: float = inf) -> tuple[float, int]:
        """Period and bytes that move; infinite if it does not fit or is certainly longer than ``at_most``."""
        if gaps in self._costs:
            return self._costs[gaps]
        if self.bound(gaps) > at_most or self.evaluated >= self.limit:
            return (inf, 0)
        evictions = issue(self.problem, gaps)
        if evictions is None:
            self._costs[gaps] = (inf, 0)
        else:
            self.evaluated += 1
            moved = sum(self.problem.weights[gap.weight].num_bytes for gap in gaps)
            self._costs[gaps] = (reload_period(self.problem, evictions), moved)
        return self._costs[gaps]

    def bound(self, gaps: Iterable[Gap]) -> float:
        """A lower bound on the period of any plan with ``gaps``."""
        return max(self.problem.compute_seconds, fsum(self._up[gap.weight] for gap in gaps)) * (1 - SAME)

    def best(self, number: int) -> list[Gaps]:
        """The best plans so far."""
        fitting = [gaps for gaps, cost in self._costs.items() if cost[0] < inf]
        index = self._index.__getitem__
        return nsmallest(number, fitting, key=lambda gaps: (self._costs[gaps], sorted(map(index, gaps))))

    @property
    def period(self) -> float:
        """The period of the best plan so far."""
        return min((cost[0] for cost in self._costs.values()), default=inf)

    @property
    def is_done(self) -> bool:
        """Whether the best plan is optimal: compute waits for nothing."""
        return self.period <= self.problem.compute_seconds * (1 + SAME)

    def found(self) -> tuple[Eviction, ...]:
        """The best plan."""
        evictions = issue(self.problem, self.best(1)[0])
        assert evictions is not None
        return evictions

    def try_in_order(self, candidates: Iterable[Candidate], limit: int | None = None) -> None:
        """Evaluate ``candidates``, which come by lower bound, until no better one can follow; at most ``limit``."""
        limit = self.limit if limit is None else limit
        for bound, _, gaps_of in candidates:
            if self.is_done or bound >= self.period or self.evaluated >= limit:
                return
            self.cost(gaps_of())

    def prefixes_and_suffixes(self) -> Iterator[Candidate]:
        """Turns of the first blocks with boundaries of the last blocks: all pairs of counts that fit, by lower bound.

        There are as many pairs as the square of the blocks, so a pair is made when it is its turn, and its set only if
        it is evaluated.
        """
        problem, count, rank = self.problem, len(self.problem.ticks), self.problem.rank
        turns = sorted((g for g in problem.gaps if g.before < count), key=lambda g: (g.after, rank[g.weight]))
        ends = sorted((g for g in problem.gaps if g.before >= count), key=lambda g: (-g.before, rank[g.weight]))
        ups = [list(accumulate((self._up[gap.weight] for gap in some), initial=0.0)) for some in (turns, ends)]

        def rising(number: int, least: int) -> Iterator[Candidate]:
            for more in range(least, len(ends) + 1):
                bound = max(problem.compute_seconds, ups[0][number] + ups[1][more]) * (1 - SAME)
                yield bound, number + more, partial(_union, turns, number, ends, more)

        least, some, used = len(ends), [], least_memory(problem, ends)
        for number in range(len(turns) + 1):
            if number:
                self._add(used, turns[number - 1], -1)
            while least >= 0 and max(used) <= problem.budget:
                least -= 1  # it fits; try with one boundary less
                if least >= 0:
                    self._add(used, ends[least], 1)
            some.append(rising(number, least + 1))
        yield from merge(*some, key=_first)

    def _add(self, used: list[int], gap: Gap, sign: int) -> None:
        """Add the bytes of the weight of ``gap``, or take them away, at the ticks of the gap."""
        size = sign * self.problem.weights[gap.weight].num_bytes
        for tick in self._interior[gap]:
            used[tick] += size

    def improve_all(self) -> None:
        """C from the best of the prefixes and suffixes, from each start of A, and from all gaps."""
        self.try_in_order(self.prefixes_and_suffixes(), self.limit // 3)
        for gaps in self.best(1):
            self.improve(gaps)
        for key in self._start_keys():
            if not self.is_done:
                self.improve(self.start(key))
        self.improve(frozenset(self.problem.gaps))

    def start(self, key: Key) -> Gaps:
        """A: gaps taken by ``key`` at the worst tick, until all ticks fit."""
        problem, chosen = self.problem, set[Gap]()
        used, in_order = list(problem.all_present), sorted(problem.gaps, key=key, reverse=True)
        bits = [self._bits[gap] for gap in in_order]
        while (most := max(used)) > problem.budget:
            worst = 1 << used.index(most)  # some gap spans it: ``check_fits`` passed
            at = next(at for at, ticks in enumerate(bits) if ticks & worst)
            taken, _ = in_order.pop(at), bits.pop(at)
            chosen.add(taken)
            self._add(used, taken, -1)
        return frozenset(chosen)

    def _start_keys(self) -> list[Key]:
        problem, weights, index = self.problem, self.problem.weights, self._index
        return [
            lambda gap: (problem.idle_seconds(gap), weights[gap.weight].num_bytes, -index[gap]),
            lambda gap: (problem.idle_seconds(gap) / self._up[gap.weight], -index[gap]),
            lambda gap: (-weights[gap.weight].num_bytes, -index[gap]),
        ]

    def improve(self, gaps: Gaps) -> None:
        """C: better plans near ``gaps``, until there is none."""
        current, cost = gaps, self.cost(gaps)
        improved = True
        while improved and not self.is_done and self.evaluated < self.limit:
            improved = False
            short = self._short(least_memory(self.problem, current))
            copies = fsum(self._up[gap.weight] for gap in current)
            for out, into in self._moves(current):
                if not self._may_gain(out, into, copies, cost[0]) or not self._may_fit(out, into, short):
                    continue
                other = current.difference(out).union(into)
                new = self.cost(other, cost[0])
                if new[0] < cost[0] * (1 - SAME) or (new[0] <= cost[0] * (1 + SAME) and new[1] < cost[1]):
                    current, cost, improved = other, new, True
                    break
                if self.evaluated >= self.limit:
                    return

    def _may_gain(self, out: Some, into: Some, copies: float, at_most: float) -> bool:
        """Whether the lower bound after this move is at most ``at_most``; before it copies take ``copies`` seconds."""
        copies += sum(self._up[gap.weight] for gap in into) - sum(self._up[gap.weight] for gap in out)
        return max(self.problem.compute_seconds, copies) * (1 - SAME) <= at_most

    def _short(self, used: Sequence[int]) -> Callable[[int], int]:
        """The ticks, as bits of a number, at which so many bytes more than ``used`` are too many."""
        budget = self.problem.budget
        return cache(lambda size: sum(1 << tick for tick, there in enumerate(used) if there + size > budget))

    def _may_fit(self, out: Some, into: Some, short: Callable[[int], int]) -> bool:
        """Whether this move is within the budget; larger ones than a swap are for ``issue`` to see."""
        if len(out) != 1 or len(into) > 1:
            return True
        size, ticks = self.problem.weights[out[0].weight].num_bytes, self._bits[out[0]]
        if not into:
            return not ticks & short(size)
        less, both = self.problem.weights[into[0].weight].num_bytes, ticks & self._bits[into[0]]
        return not (ticks ^ both) & short(size) and not both & short(size - less)

    def _moves(self, gaps: Gaps) -> Iterator[tuple[Some, Some]]:
        """The gaps that are dropped and those that are added."""
        inside = [gap for gap in self.problem.gaps if gap in gaps]
        outside = [gap for gap in self.problem.gaps if gap not in gaps]
        yield from (((gap,), ()) for gap in inside)
        few = len(self.problem.gaps) <= MANY
        for gap in inside:
            near = outside if few else self._near(gap, gaps)
            yield from (((gap,), (other,)) for other in near)
        yield from (((), (gap,)) for gap in outside)
        if few:
            for pair in combinations(outside, 2):
                yield from (((gap,), pair) for gap in inside)
            for pair in combinations(inside, 2):
                yield from ((pair, (gap,)) for gap in outside)

    def _near(self, gap: Gap, gaps: Gaps) -> list[Gap]:
        """Gaps outside of ``gaps`` that begin about when ``gap`` does."""
        at, every = self._index[gap], self.problem.gaps
        before = (every[index] for index in reversed(range(at)) if every[index] not in gaps)
        after = (every[index] for index in range(at + 1, len(every)) if every[index] not in gaps)
        return [*islice(before, NEAR), *islice(after, NEAR)]


def _bits(gap: Gap, count: int) -> int:
    """The ticks of ``gap`` as bits of a number; those beyond ``count`` are of the next iteration."""
    ticks = (1 << gap.before) - (1 << (gap.after + 1))
    return (ticks | ticks >> count) & ((1 << count) - 1)


def _first(candidate: Candidate) -> tuple[float, int]:
    return candidate[:2]


def _itself(gaps: Gaps) -> Gaps:
    return gaps


def _union(turns: Sequence[Gap], number: int, ends: Sequence[Gap], more: int) -> Gaps:
    return frozenset((*turns[:number], *ends[:more]))


def _is_uniform(problem: Problem) -> bool:
    """Whether all blocks are alike, so that two integers are enough."""
    count, weights = len(problem.ticks), problem.weights
    if count != 2 * len(weights) or any(weight.uses != (i, count - 1 - i) for i, weight in enumerate(weights)):
        return False
    seconds = [tick.seconds for tick in problem.ticks]
    halves = (seconds[: len(weights)], seconds[len(weights) :], [weight.num_bytes for weight in weights])
    return all(len(set(half)) == 1 for half in halves)
