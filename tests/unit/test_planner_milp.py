"""The planner against a mixed-integer program of the same problem (scipy's HiGHS): up to 12 blocks."""

from itertools import count
from statistics import mean
from typing import Any

import numpy
import pytest
from scipy import optimize

from strategies.planner.greedy import choose
from strategies.planner.problem import Problem, need_order
from strategies.planner.simulate import reload_period
from tests.unit.planning import uneven

SECONDS = 1.5  # per problem; what is best by then counts


def solved(problem: Problem) -> tuple[float, bool]:
    """The shortest period over all gaps and all ticks of issue that is found in time, and whether it is proven to be.

    Times repeat after the period. Unknown are the period, an end per tick, an arrival per gap, and a binary for each
    tick at which the way back may be issued. A gap that is not taken passes on the arrival before it, which its
    tick has waited for anyway.
    """
    ticks, gaps = problem.ticks, need_order(problem, problem.gaps)
    needs = [gap.before % len(ticks) for gap in gaps]  # and when it leaves, before 0 in the iteration before
    leaves = [need - (gap.before - gap.after) for need, gap in zip(needs, gaps, strict=True)]
    sizes = [problem.weights[gap.weight].num_bytes for gap in gaps]
    copies = list(map(problem.up_seconds, sizes))
    far = 3 * (problem.compute_seconds + sum(copies))
    issues = [(index, tick) for index in range(len(gaps)) for tick in range(leaves[index] + 2, needs[index] + 1)]
    first = 1 + len(ticks) + len(gaps)
    unknowns: Any = numpy.eye(first + len(issues))
    period, ends, arrivals, issued = numpy.split(unknowns, [1, 1 + len(ticks), first])
    rows: list[tuple[Any, float]] = []  # so much at least

    def end(tick: int) -> Any:
        return ends[tick] - (period[0] if tick < 0 else 0)

    for tick, todo in enumerate(ticks):
        rows.append((end(tick) - end(tick - 1), todo.seconds))
        away = [
            (leaves[index] < at < back) * sizes[index] for index, back in issues for at in (tick, tick - len(ticks))
        ]
        freed = numpy.reshape(away, (-1, 2)).max(1) @ issued
        rows.append((freed, problem.all_present[tick] - problem.budget))
    for index, need in enumerate(needs):
        own = [at for at, issue in enumerate(issues) if issue[0] == index]
        taken = issued[own].sum(0)
        before = arrivals[index - 1] - (0 if index else period[0])
        rows.append((arrivals[index] - before - copies[index] * taken, 0))
        rows.append((end(need) - arrivals[index], ticks[need].seconds))
        rows.append((-taken, -1))
        for at in own:
            rows.append((arrivals[index] - end(issues[at][1] - 1) - far * issued[at], copies[index] - far))
    binary = numpy.arange(len(unknowns)) >= first
    found: Any = optimize.milp(
        period[0],
        integrality=binary,
        bounds=optimize.Bounds(numpy.where(binary, 0, -numpy.inf), numpy.where(binary, 1, numpy.inf)),
        constraints=optimize.LinearConstraint([row for row, _ in rows], [least for _, least in rows], numpy.inf),
        options={"time_limit": SECONDS},
    )
    return float("inf") if found.x is None else float(found.x[0]), found.status == 0


@pytest.mark.slow
def test_against_a_solver() -> None:
    """Six problems in which copies cannot hide; where they can, compute alone proves the choice."""
    ratios: list[float] = []
    for problem in (uneven(seed, (6, 8, 10, 12)) for seed in count()):
        seconds = reload_period(problem, choose(problem))
        if seconds <= problem.compute_seconds * (1 + 1e-6):
            continue
        best, is_proven = solved(problem)
        ratios.append(seconds / best)
        assert ratios[-1] >= 1 - 1e-6 or not is_proven, problem
        if len(ratios) == 6:
            break
    assert mean(ratios) <= 1.01
