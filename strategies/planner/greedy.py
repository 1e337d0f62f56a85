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
because it holds for each candidate. Elsewhere the plans of smaller budgets are tried too, and it is measured, not
proven.

Refused: budgets below what is needed with every gap evicted (``DoesNotFit``); problems with updates or saved tensors,
which ``weight_schedule.py`` leaves out.

Cost. Evaluating a plan takes O(ticks + gaps) and a little for B. A search evaluates at most ``SEARCHED`` plans and as
many again with smaller budgets, so that a hundred blocks take well under a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from itertools import accumulate, combinations
from math import fsum, inf
from typing import TypeAlias

from strategies.planner.problem import Eviction, Gap, Problem, at_need, memory, need_order
from strategies.planner.simulate import SAME, reload_period

FEW = 10  # gaps of which all sets are tried
MANY = 24  # gaps up to which one is swapped for two
NEAR = 4  # with more gaps, one is swapped for so many on either side of it
LEVELS = 6  # smaller budgets whose plans are tried too
SEARCHED = 150  # plans that one search evaluates at most; more found nothing better for a 7 B model
LEADS = 8  # plans of each smaller budget that are evaluated

Gaps: TypeAlias = frozenset[Gap]
Key: TypeAlias = Callable[[Gap], tuple[float, ...]]
Candidate: TypeAlias = tuple[float, int, Callable[[], Gaps]]  # lower bound of the period, number of gaps, and the gaps


class DoesNotFit(Exception):
    """No plan is within the budget; the message says how many bytes are missing."""


def choose(problem: Problem, *, thorough: bool = True) -> tuple[Eviction, ...]:
    """The best plan that is found.

    Args:
        thorough: where not every candidate is tried, whether to try three times as many, and those of smaller budgets.

    Raises:
        DoesNotFit: no plan is within the budget.
    """
    assert problem.moves_weights_only, "updates and saved tensors are not part of this search"
    check_fits(problem)
    few = len(problem.gaps) <= FEW
    search = Search(problem, 1 << FEW if few else SEARCHED if thorough else SEARCHED // 3)
    if few:
        every = (frozenset(s) for n in range(len(problem.gaps) + 1) for s in combinations(problem.gaps, n))
        search.try_in_order((search.bound(gaps), len(gaps), partial(_itself, gaps)) for gaps in every)
    elif _is_uniform(problem):
        search.try_in_order(search.prefixes_and_suffixes())
    else:
        search.improve_all()
        if thorough:
            _smaller_budgets(search)
    return search.found()


def check_fits(problem: Problem) -> None:
    """Raise ``DoesNotFit`` unless there is a plan within the budget."""
    least = memory(problem, at_need(problem.gaps))
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
    least = memory(problem, at_need(order))
    if max(least) > budget:
        return None
    earliest = -2 * count
    for _ in range(2):
        used, last, found = list(least), earliest, []
        for gap in order:
            need = (gap.before - middle) % count
            bound = max(last, need - (gap.before - gap.after) + 1)
            size, at = problem.weights[gap.weight].num_bytes, need
            while at > bound and used[(at - 1 + middle) % count] <= budget - size:
                at -= 1
                used[(at + middle) % count] += size
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
        self._interior = {gap: {t % count for t in range(gap.after + 1, gap.before)} for gap in problem.gaps}

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
        """Evaluate ``candidates`` by lower bound until no better one can follow; at most ``limit``."""
        limit = self.limit if limit is None else limit
        for bound, _, gaps_of in sorted(candidates, key=lambda it: it[:2]):
            if self.is_done or bound >= self.period or self.evaluated >= limit:
                return
            self.cost(gaps_of())

    def prefixes_and_suffixes(self) -> Iterator[Candidate]:
        """Turns of the first blocks with boundaries of the last blocks: all pairs of counts that fit.

        There are as many pairs as the square of the blocks, so each set is made only if it is evaluated.
        """
        problem, count, rank = self.problem, len(self.problem.ticks), self.problem.rank
        turns = sorted((g for g in problem.gaps if g.before < count), key=lambda g: (g.after, rank[g.weight]))
        ends = sorted((g for g in problem.gaps if g.before >= count), key=lambda g: (-g.before, rank[g.weight]))
        ups = [list(accumulate((self._up[gap.weight] for gap in some), initial=0.0)) for some in (turns, ends)]
        least = len(ends)
        for number in range(len(turns) + 1):
            while least >= 0 and max(memory(problem, at_need(turns[:number] + ends[:least]))) <= problem.budget:
                least -= 1  # it fits; try with one boundary less
            for more in range(least + 1, len(ends) + 1):
                bound = max(problem.compute_seconds, ups[0][number] + ups[1][more]) * (1 - SAME)
                yield bound, number + more, partial(_union, turns, number, ends, more)

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
        used = list(problem.all_present)
        while max(used) > problem.budget:
            worst = used.index(max(used))
            spanning = [gap for gap in problem.gaps if gap not in chosen and worst in self._interior[gap]]
            taken = max(spanning, key=key)  # there is one: ``check_fits`` passed
            chosen.add(taken)
            for tick in self._interior[taken]:
                used[tick] -= problem.weights[taken.weight].num_bytes
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
            for other in self._moves(current):
                new = self.cost(other, cost[0])
                if new[0] < cost[0] * (1 - SAME) or (new[0] <= cost[0] * (1 + SAME) and new[1] < cost[1]):
                    current, cost, improved = other, new, True
                    break

    def _moves(self, gaps: Gaps) -> Iterator[Gaps]:
        inside = [gap for gap in self.problem.gaps if gap in gaps]
        outside = [gap for gap in self.problem.gaps if gap not in gaps]
        yield from (gaps - {gap} for gap in inside)
        few = len(self.problem.gaps) <= MANY
        for gap in inside:
            near = outside if few else self._near(gap, gaps)
            yield from ((gaps - {gap}) | {other} for other in near)
        yield from (gaps | {gap} for gap in outside)
        if few:
            for pair in combinations(outside, 2):
                yield from ((gaps - {gap}).union(pair) for gap in inside)
            for pair in combinations(inside, 2):
                yield from (gaps.difference(pair) | {gap} for gap in outside)

    def _near(self, gap: Gap, gaps: Gaps) -> list[Gap]:
        """Gaps outside of ``gaps`` that begin about when ``gap`` does."""
        at = self._index[gap]
        before = [other for other in reversed(self.problem.gaps[:at]) if other not in gaps][:NEAR]
        return before + [other for other in self.problem.gaps[at + 1 :] if other not in gaps][:NEAR]


def _smaller_budgets(search: Search) -> None:
    """Evaluate the best plans of smaller budgets with the budget of ``search``."""
    problem = search.problem
    least = max(memory(problem, at_need(problem.gaps)))
    search.limit += search.evaluated
    for level in range(LEVELS):
        if search.is_done:
            return
        budget = least + (problem.budget - least) * level // LEVELS
        smaller = Search(replace(problem, budget=budget), (search.limit - search.evaluated) // (2 * LEVELS))
        smaller.improve_all()
        for gaps in smaller.best(LEADS):
            search.cost(gaps, search.period)


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
