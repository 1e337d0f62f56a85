"""Which weights leave when, and when they come back: greedy, then polished, each step judged by the simulator.

    A  which    while a step needs too much: of the gaps that span the worst step, take the one whose idle compute is
                longest; further starts go by idle compute per second of copy, and by the smallest
    B  when     in order of need, issue each reload as early as memory allows, none before the one needed earlier
    C  polish   drop a gap, swap two, add one, swap one for two or two for one, while the period or the bytes shrink;
                from each start of A, from the best prefix and suffix (below), and from all gaps

B looks at an iteration from the middle, where backward begins, and twice: the first look says how late the last reload
is issued, which bounds the first one of the next iteration. So it was best among all issue vectors in 600 small
instances, and more memory never made it slower for the same gaps (40,000 budgets), which is not so for other cuts.

Where blocks are alike, the best turns are a prefix of the blocks and the best boundaries a suffix: two integers. That
search is complete: candidates come in order of a lower bound (compute, or the time of their copies) and end when the
bound reaches the best. For at most ``FEW`` gaps all sets of gaps are tried the same way.

Invariant. More memory or a faster link never makes the choice slower: where every candidate is tried that holds since
it holds for each of them. Elsewhere the plans of smaller budgets are tried too, and it is measured, not proven.

Cost. A price takes O(steps + gaps) and a little for B. ``WORK`` bounds how many steps and gaps are looked at in all, so
that a hundred blocks take well under a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import fsum
from typing import TypeAlias

from strategies.planner.problem import Eviction, Gap, Problem, at_need, memory, need_order
from strategies.planner.simulate import SAME, reload_period, simulate

FEW = 10  # gaps of which all sets are tried
MANY = 24  # gaps up to which one is swapped for two
NEAR = 4  # with more gaps, one is swapped for so many on either side of it
LEVELS = 6  # smaller budgets whose plans are tried too
WORK = 60_000  # steps and gaps of all plans that are priced by one search
SLOWER = 20  # a price with updates takes so many times as long
LEADS = 8  # plans of the search over weights that are priced with updates

Gaps: TypeAlias = frozenset[Gap]


class DoesNotFit(Exception):
    """No plan is within the budget: ``deficit`` bytes too much at ``step``, with everything away that can be."""

    def __init__(self, step: str, deficit: int) -> None:
        super().__init__(f"{step} needs {deficit} bytes more than there are")
        self.step, self.deficit = step, deficit


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, its seconds per iteration, and how many plans were priced to find it."""

    evictions: tuple[Eviction, ...]
    period: float
    priced: int


def choose(problem: Problem, limit: int | None = None) -> Found:
    """The best plan that is found; each of two searches prices at most ``limit`` plans (None: see ``WORK``).

    Raises:
        DoesNotFit: there is none.
    """
    check_fits(problem)
    limit = limit or _limit(problem)
    if problem.moves_weights_only:
        return _choose(problem, limit).found()
    alone = replace(problem, items=tuple(replace(item, update=None) for item in problem.items), accumulation=1)
    before = _choose(alone, limit)
    search = Search(problem, max(2 * LEADS, limit // SLOWER))
    for gaps in before.best(LEADS):
        search.price(gaps)
    search.polish(search.best(1)[0])
    search.elsewhere = before.priced + before.elsewhere
    return search.found()


def check_fits(problem: Problem) -> None:
    """Nothing, if there is a plan within the budget.

    Raises:
        DoesNotFit: there is none.
    """
    least = memory(problem, at_need(problem.gaps))
    worst = max(range(len(least)), key=least.__getitem__)
    if least[worst] > problem.budget:
        raise DoesNotFit(problem.steps[worst].name, least[worst] - problem.budget)


def issue(problem: Problem, gaps: Iterable[Gap]) -> tuple[Eviction, ...] | None:
    """B: reloads as early as memory allows, in order of need; None where ``gaps`` are not enough."""
    count, budget = len(problem.steps), problem.budget
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
            room, at = budget - problem.items[gap.item].num_bytes, need
            while at > bound and used[(at - 1 + middle) % count] <= room:
                at -= 1
                used[(at + middle) % count] += problem.items[gap.item].num_bytes
            found.append(Eviction(gap, gap.before - need + at))
            last = at
        earliest = last - count
    return tuple(found)


class Search:
    """Plans of one problem, each priced once."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit, self.priced, self.elsewhere = problem, limit, 0, 0
        self._prices: dict[Gaps, tuple[float, int]] = {}
        self._up = [problem.link.up_seconds(item.num_bytes) for item in problem.items]
        self._pure = problem.moves_weights_only
        self._place = {gap: index for index, gap in enumerate(problem.gaps)}
        count = len(problem.steps)
        self._interior = {gap: {s % count for s in range(gap.after + 1, gap.before)} for gap in problem.gaps}

    def price(self, gaps: Gaps, at_most: float = float("inf")) -> tuple[float, int]:
        """Period and bytes that move; infinite, where it does not fit or is certainly longer than ``at_most``."""
        if gaps in self._prices:
            return self._prices[gaps]
        worse = (float("inf"), 0)
        if self.bound(gaps) > at_most or self.priced >= self.limit:
            return worse
        evictions = issue(self.problem, gaps)
        if evictions is None:
            self._prices[gaps] = worse
            return worse
        self.priced += 1
        period = reload_period(self.problem, evictions) if self._pure else simulate(self.problem, evictions).period
        self._prices[gaps] = (period, sum(self.problem.items[gap.item].num_bytes for gap in gaps))
        return self._prices[gaps]

    def bound(self, gaps: Iterable[Gap]) -> float:
        """No plan with ``gaps`` has a shorter period."""
        return max(self.problem.compute_seconds, fsum(self._up[gap.item] for gap in gaps)) * (1 - SAME)

    def best(self, number: int) -> list[Gaps]:
        """The best plans so far."""
        priced = [gaps for gaps, price in self._prices.items() if price[0] < float("inf")]
        return sorted(priced, key=lambda gaps: (self._prices[gaps], sorted(map(self._place.__getitem__, gaps))))[
            :number
        ]

    @property
    def period(self) -> float:
        """Of the best plan so far."""
        return min((price[0] for price in self._prices.values()), default=float("inf"))

    @property
    def is_done(self) -> bool:
        """Whether nothing can be better: compute waits for nothing."""
        return self._pure and self.period <= self.problem.compute_seconds * (1 + SAME)

    def found(self) -> Found:
        """The best plan."""
        evictions = issue(self.problem, self.best(1)[0])
        assert evictions is not None
        return Found(evictions, self.period, self.priced + self.elsewhere)

    def start(self, key: Callable[[Gap], tuple[float, ...]]) -> Gaps:
        """A: gaps that make the worst step fit, taken by ``key``, until all do."""
        problem, chosen = self.problem, set[Gap]()
        used = list(problem.all_present)
        while max(used) > problem.budget:
            worst = used.index(max(used))
            spanning = [gap for gap in problem.gaps if gap not in chosen and worst in self._interior[gap]]
            taken = max(spanning, key=key)  # there is one: the problem was checked
            chosen.add(taken)
            for step in self._interior[taken]:
                used[step] -= problem.items[taken.item].num_bytes
        return frozenset(chosen)

    def rules(self) -> list[Callable[[Gap], tuple[float, ...]]]:
        """What A may go by."""
        problem, items, place = self.problem, self.problem.items, self._place
        return [
            lambda gap: (problem.idle_seconds(gap), items[gap.item].num_bytes, -place[gap]),
            lambda gap: (problem.idle_seconds(gap) / self._up[gap.item], -place[gap]),
            lambda gap: (-items[gap.item].num_bytes, -place[gap]),
        ]

    def polish(self, gaps: Gaps) -> None:
        """C: better plans near ``gaps``, until there is none."""
        current, price = gaps, self.price(gaps)
        improved = True
        while improved and not self.is_done and self.priced < self.limit:
            improved = False
            for other in self._moves(current):
                new = self.price(other, price[0])
                if new[0] < price[0] * (1 - SAME) or (new[0] <= price[0] * (1 + SAME) and new[1] < price[1]):
                    current, price, improved = other, new, True
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
        """Gaps not taken that begin about when ``gap`` does."""
        place = self._place[gap]
        before = [other for other in reversed(self.problem.gaps[:place]) if other not in gaps][:NEAR]
        return before + [other for other in self.problem.gaps[place + 1 :] if other not in gaps][:NEAR]


def polished(problem: Problem, limit: int | None = None) -> Found:
    """A, B and C alone: no enumeration, no smaller budgets.

    Raises:
        DoesNotFit: there is no plan within the budget.
    """
    check_fits(problem)
    search = Search(problem, limit or _limit(problem))
    _polish_all(search)
    return search.found()


def two_integers(problem: Problem, limit: int | None = None) -> Found:
    """The best of the plans whose turns are those of the first blocks and whose boundaries those of the last.

    Raises:
        DoesNotFit: there is no plan within the budget.
    """
    check_fits(problem)
    search = Search(problem, limit or _limit(problem))
    _try_in_order(search, _prefixes_and_suffixes(problem), search.limit)
    return search.found()


def _limit(problem: Problem) -> int:
    return max(1, WORK // (len(problem.steps) + len(problem.gaps)))


def _choose(problem: Problem, limit: int) -> Search:
    if len(problem.gaps) <= FEW:
        search = Search(problem, 1 << FEW)
        sets = (frozenset(some) for n in range(len(problem.gaps) + 1) for some in combinations(problem.gaps, n))
        _try_in_order(search, sets, search.limit)
        return search
    search = Search(problem, limit)
    if _is_uniform(problem):
        _try_in_order(search, _prefixes_and_suffixes(problem), limit)
    else:
        _polish_all(search)
        _smaller_budgets(search)
    return search


def _smaller_budgets(search: Search) -> None:
    """Plans that are good with less memory."""
    problem = search.problem
    least = max(memory(problem, at_need(problem.gaps)))
    search.limit = search.priced + search.limit
    for level in range(LEVELS):
        if search.is_done:
            return
        budget = least + (problem.budget - least) * level // LEVELS
        smaller = Search(replace(problem, budget=budget), (search.limit - search.priced) // (2 * LEVELS))
        _polish_all(smaller)
        search.elsewhere += smaller.priced
        for gaps in smaller.best(LEADS):
            search.price(gaps, search.period)


def _polish_all(search: Search) -> None:
    """From the best of the prefixes and suffixes, from what A takes by each rule, and from everything."""
    _try_in_order(search, _prefixes_and_suffixes(search.problem), search.limit // 3)
    for gaps in search.best(1):
        search.polish(gaps)
    for rule in search.rules():
        if not search.is_done:
            search.polish(search.start(rule))
    search.polish(frozenset(search.problem.gaps))


def _try_in_order(search: Search, sets: Iterable[Gaps], most: int) -> None:
    """Price ``sets``, by lower bound, until it tells that no better one can come; at most so many."""
    for _, _, gaps in sorted(((search.bound(gaps), len(gaps), gaps) for gaps in sets), key=lambda it: it[:2]):
        if search.is_done or search.bound(gaps) >= search.period or search.priced >= most:
            return
        search.price(gaps)


def _prefixes_and_suffixes(problem: Problem) -> Iterator[Gaps]:
    """All that fit."""
    count = len(problem.steps)
    turns = sorted(gap for gap in problem.gaps if gap.before < count)
    turns.sort(key=lambda gap: (gap.after, problem.rank[gap.item]))
    ends = [gap for gap in problem.gaps if gap.before >= count]
    ends.sort(key=lambda gap: (-gap.before, problem.rank[gap.item]))
    least = len(ends)
    for number in range(len(turns) + 1):
        while least >= 0 and max(memory(problem, at_need(turns[:number] + ends[:least]))) <= problem.budget:
            least -= 1  # it fits; with one less?
        yield from (frozenset(turns[:number] + ends[:more]) for more in range(least + 1, len(ends) + 1))


def _is_uniform(problem: Problem) -> bool:
    """Whether blocks are alike, so that two integers are enough."""
    count, items = len(problem.steps), problem.items
    if count != 2 * len(items) or any(item.uses != (i, count - 1 - i) for i, item in enumerate(items)):
        return False
    seconds = [step.seconds for step in problem.steps]
    halves = (seconds[: len(items)], seconds[len(items) :], [item.num_bytes for item in items])
    return all(len(set(half)) == 1 for half in halves)
