"""Random planning problems, the same for the same seed; the best plans of small ones; and checks of any plan."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random

from deepstow.strategies.planner.problem import Eviction, Gap, Link, Problem, Tick, Weight, at_need, memory
from deepstow.strategies.planner.simulate import reload_period
from deepstow.strategies.planner.weight_schedule import issue


def blocks(
    weights: list[int], forward: list[float], backward: list[float], saved: list[int], link: Link, budget: int
) -> Problem:
    """Blocks that forward goes through and backward in reverse; each saves bytes from its forward to its backward."""
    count, live = len(weights), 0
    steps = []
    for index in range(count):
        live += saved[index]
        steps.append(Tick(f"FP {index}", forward[index], live))
    for index in reversed(range(count)):
        steps.append(Tick(f"BP {index}", backward[index], live))
        live -= saved[index]
    items = tuple(Weight(str(i), size, (i, 2 * count - 1 - i)) for i, size in enumerate(weights))
    return Problem(tuple(steps), items, link, budget)


def uneven(seed: int, counts: tuple[int, ...] = (3, 4, 5), kind: str = "uneven", byte: int = 100) -> Problem:
    """Blocks that are all different, with a budget that something must leave for."""
    random = Random(f"{kind} {seed}")
    count = random.choice(counts)
    weights = [random.randint(byte, 10 * byte) for _ in range(count)]
    forward = [random.uniform(0.5, 2) for _ in range(count)]
    backward = [seconds * random.uniform(1.5, 3.2) for seconds in forward]
    saved = [random.randint(0, 6 * byte) for _ in range(count)]
    return _budgeted(blocks(weights, forward, backward, saved, Link(0, 1, 1), 0), random)


def coarse(seed: int, counts: tuple[int, ...] = (3, 4, 5)) -> Problem:
    """Uneven blocks of few bytes each: many ties."""
    return uneven(seed, counts, "coarse", 1)


def halved(problem: Problem) -> Problem:
    """The problem with each item in two of different size, which the same steps use."""
    items = [
        Weight(f"{item.name}{part}", size, item.uses)
        for item in problem.weights
        for part, size in (("a", item.num_bytes // 3), ("b", item.num_bytes - item.num_bytes // 3))
    ]
    return replace(problem, weights=tuple(items))


def even(seed: int, counts: tuple[int, ...] = (3, 4, 5)) -> Problem:
    """Blocks that are all alike."""
    random = Random(f"even {seed}")
    count = random.choice(counts)
    size, seconds = random.randint(1, 9) * 100, random.uniform(0.5, 2)
    saved = [random.randint(0, 600)] * count
    back = [seconds * random.uniform(1.5, 3.2)] * count
    return _budgeted(blocks([size] * count, [seconds] * count, back, saved, Link(0, 1, 1), 0), random)


def _budgeted(problem: Problem, random: Random) -> Problem:
    least, most = span(problem)
    rate = sum(item.num_bytes for item in problem.weights) / problem.compute_seconds
    rate *= random.choice([0.5, 0.75, 1, 1.5, 2, 3, 5])
    link = Link(random.choice([0, 0.05]), rate, rate)
    return replace(problem, budget=random.randint(least, most - 1), link=link)


def span(problem: Problem) -> tuple[int, int]:
    """The least budget with a plan, and the budget for which nothing has to leave."""
    return max(memory(problem, at_need(problem.gaps))), max(problem.all_present)


def best_gaps(problem: Problem) -> float:
    """The shortest period of all sets of gaps; infinite if none fits."""
    plans = (issue(problem, gaps) for gaps in _sets(problem))
    return min((reload_period(problem, plan) for plan in plans if plan is not None), default=float("inf"))


def all_issues(problem: Problem) -> float:
    """The shortest period of all sets of gaps with all ticks to issue their reloads at."""
    found = float("inf")
    for gaps in _sets(problem):
        for steps in product(*(range(gap.after + 2, gap.before + 1) for gap in gaps)):
            plan = [Eviction(gap, step) for gap, step in zip(gaps, steps, strict=True)]
            if max(memory(problem, plan)) <= problem.budget:
                found = min(found, reload_period(problem, plan))
    return found


def complaints(problem: Problem, evictions: Sequence[Eviction]) -> list[str]:
    """Everything wrong with a plan: gaps that are none, issues outside their gap, too much memory."""
    known = set(problem.gaps)
    found = [f"{e.gap}: not a gap of this problem" for e in evictions if e.gap not in known]
    found += [f"{e.gap}: issued at {e.issue}" for e in evictions if not e.gap.after < e.issue <= e.gap.before]
    if len({eviction.gap for eviction in evictions}) < len(evictions):
        found.append("a gap is evicted twice")
    if found:
        return found
    return [
        f"{tick.name}: {here} bytes, {here - problem.budget} too much"
        for tick, here in zip(problem.ticks, memory(problem, evictions), strict=True)
        if here > problem.budget
    ]


def _sets(problem: Problem) -> Iterator[tuple[Gap, ...]]:
    for number in range(len(problem.gaps) + 1):
        yield from combinations(problem.gaps, number)
