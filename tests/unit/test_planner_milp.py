"""The planner against a mixed-integer program of the same problem (scipy's HiGHS): up to 12 blocks."""

from itertools import count
from statistics import mean
from typing import Any

import pytest
from scipy import optimize

from strategies.planner.greedy import choose
from strategies.planner.problem import Gap, Problem, need_order
from strategies.planner.simulate import reload_period
from tests.unit.planning import uneven

SECONDS = 1.5  # per problem; what is best by then counts


class Program:
    """Minimal period over all gaps and all issue steps, in steady state: times repeat after the period.

    Columns: the period, an end per step, an arrival per gap, and per gap one binary for each step of issue.
    A gap that is not taken passes on the arrival before it, which its step has waited for anyway.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.ticks)
        self.gaps = need_order(problem, problem.gaps)
        self.copies = [problem.up_seconds(problem.weights[gap.weight].num_bytes) for gap in self.gaps]
        self.far = 3 * (problem.compute_seconds + sum(self.copies))
        self.first = 1 + self.count + len(self.gaps)
        self.issues = [(index, step) for index, gap in enumerate(self.gaps) for step in self._steps(gap)]
        self.columns = {key: self.first + at for at, key in enumerate(self.issues)}
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []

    def _steps(self, gap: Gap) -> range:
        """When the way back may be issued, from the start of the iteration that needs it."""
        need = gap.before % self.count
        return range(need - (gap.before - gap.after) + 2, need + 1)

    def end(self, step: int) -> dict[int, float]:
        """When a step ends; before 0: in the iteration before."""
        return {1 + step: 1.0} if step >= 0 else {1 + step + self.count: 1.0, 0: -1.0}

    def row(self, least: float, *parts: tuple[float, dict[int, float]]) -> None:
        """The sum of ``parts`` is at least ``least``."""
        made: dict[int, float] = {}
        for factor, part in parts:
            for column, value in part.items():
                made[column] = made.get(column, 0.0) + factor * value
        self.rows.append(made)
        self.least.append(least)

    def build(self) -> None:
        """All rows."""
        for step, todo in enumerate(self.problem.ticks):
            self.row(todo.seconds, (1, self.end(step)), (-1, self.end(step - 1)))
        for index, gap in enumerate(self.gaps):
            arrival = {1 + self.count + index: 1.0}
            taken = {self.columns[index, step]: 1.0 for step in self._steps(gap)}
            before = {1 + self.count + (index - 1) % len(self.gaps): 1.0} | ({0: -1.0} if index == 0 else {})
            self.row(0, (1, arrival), (-1, before), (-self.copies[index], taken))
            need = gap.before % self.count
            self.row(self.problem.ticks[need].seconds, (1, self.end(need)), (-1, arrival))
            for step in self._steps(gap):
                chosen = {self.columns[index, step]: 1.0}
                self.row(self.copies[index] - self.far, (1, arrival), (-1, self.end(step - 1)), (-self.far, chosen))
            self.row(-1, (-1, taken))
        for step, here in enumerate(self.problem.all_present):
            self.row(here - self.problem.budget, (1, self._absent(step)))

    def _absent(self, step: int) -> dict[int, float]:
        """Bytes that each choice takes away from ``step``."""
        return {
            self.columns[index, issued]: float(self.problem.weights[self.gaps[index].weight].num_bytes)
            for index, issued in self.issues
            if any(self._leaves(index) < at < issued for at in (step, step - self.count))
        }

    def _leaves(self, index: int) -> int:
        gap = self.gaps[index]
        return gap.before % self.count - (gap.before - gap.after)

    def solve(self) -> tuple[float, bool]:
        """The shortest period that is found in time, and whether it is proven to be."""
        import numpy

        width = self.first + len(self.issues)
        matrix = numpy.zeros((len(self.rows), width))
        for at, made in enumerate(self.rows):
            for column, value in made.items():
                matrix[at, column] = value
        whole = numpy.zeros(width)
        whole[self.first :] = 1
        cost = numpy.zeros(width)
        cost[0] = 1
        high = numpy.where(whole > 0, 1.0, numpy.inf)
        low = numpy.where(whole > 0, 0.0, -numpy.inf)
        solved: Any = optimize.milp(
            cost,
            integrality=whole,
            bounds=optimize.Bounds(low, high),
            constraints=optimize.LinearConstraint(matrix, numpy.array(self.least), numpy.inf),
            options={"time_limit": SECONDS},
        )
        return float("inf") if solved.x is None else float(solved.x[0]), solved.status == 0


@pytest.mark.slow
def test_against_a_solver() -> None:
    """Six problems in which copies cannot hide; where they can, compute alone proves the choice."""
    ratios: list[float] = []
    for problem in (uneven(seed, (6, 8, 10, 12)) for seed in count()):
        seconds = reload_period(problem, choose(problem))
        if seconds <= problem.compute_seconds * (1 + 1e-6):
            continue
        program = Program(problem)
        program.build()
        best, is_proven = program.solve()
        ratios.append(seconds / best)
        assert ratios[-1] >= 1 - 1e-6 or not is_proven, problem
        if len(ratios) == 6:
            break
    assert mean(ratios) <= 1.01
