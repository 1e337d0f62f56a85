"""The simulator: how long one iteration of a plan takes, and why.

Compute, the link up and down, the CPU, the network and the disk work at the same time (``tasks.py`` says what they do,
and what each task waits for), and share the memories that they read and write (``machine.py``). Of the copies up that
are ready, the one needed first goes first, reloads in the order of need; of updates by the CPU that of the lowest
block, which the next forward needs first. Time is event-driven, not slotted.

The period is how much later the slowest resource finishes from one iteration to the next, once several have run: a
resource that falls behind limits the period in the long run, even while compute does not wait for it yet. What falls
behind may not show in so few iterations, so the period is at least what each resource and each memory needs for the
tasks of one iteration.

``reload_period`` gives the same period for plans that move weights only, without a trace, in O(ticks + evictions) per
iteration: the search calls it thousands of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from deepstow.strategies.planner.machine import least_seconds, run
from deepstow.strategies.planner.problem import Eviction, Problem, need_order
from deepstow.strategies.planner.tasks import Resource, Task, build_tasks

SAME = 1e-9  # times that differ by less, relatively, are taken as equal
MOST_ITERATIONS = 40


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One task of a resource, in seconds from the start of the measured iteration."""

    resource: Resource
    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How long a plan takes.

    Args:
        period: seconds per iteration in steady state.
        busy: seconds each resource works in one iteration.
        hidden: how much of that runs while compute does too.
        critical: seconds of each resource on the critical path through one iteration.
        least: seconds that each resource and each memory needs for one iteration, by name; at most the period.
        events: of the measured iteration, by start.
    """

    period: float
    busy: Mapping[Resource, float]
    hidden: Mapping[Resource, float]
    critical: Mapping[Resource, float]
    least: Mapping[str, float]
    events: tuple[TraceEvent, ...]

    @property
    def binds(self) -> Resource:
        """The resource with the largest part of the critical path."""
        return max(Resource, key=lambda resource: self.critical[resource])


def simulate(problem: Problem, evictions: Sequence[Eviction], iterations: int = 4) -> Outcome:
    """How long ``evictions`` take, measured on the last of ``iterations`` (at least 3)."""
    tasks = build_tasks(problem, evictions, iterations + 1)  # the first copies of one more run in the last
    run(tasks, problem)
    least, period, end = _measured(problem, tasks, iterations)
    start = end - period
    within = [t for t in tasks if t.end > start and t.start < end]
    spans = {r: _joined((max(t.start, start), min(t.end, end)) for t in within if t.resource is r) for r in Resource}
    last = max((t for t in tasks if t.resource is Resource.COMPUTE and t.end == end), key=lambda t: t.start)
    events = [TraceEvent(t.resource, t.start - start, t.end - start, t.label) for t in within if t.end > t.start]
    return Outcome(
        period=period,
        busy={r: sum(high - low for low, high in spans[r]) for r in Resource},
        hidden={r: _overlap(spans[r], spans[Resource.COMPUTE]) for r in Resource},
        critical=_critical(last, start),
        least=least,
        events=tuple(sorted(events, key=lambda event: (event.start, event.resource.value, event.label))),
    )


def simulated_period(
    problem: Problem, evictions: Sequence[Eviction], iterations: int = 4, after: int = 1, most: float = inf
) -> float:
    """The period of ``simulate``, in less time: what runs after the measured iteration does not matter.

    Args:
        after: iterations that begin while the measured one's copies and updates end: without, it is nearly the same.
        most: a period that is longer need not be known; the result is then what it takes at least.
    """
    tasks = build_tasks(problem, evictions, iterations + after)
    least = max(_least(problem, tasks, iterations).values())
    if least > most:
        return least
    run(tasks, problem, iterations)
    _, period, _ = _measured(problem, tasks, iterations)
    return period


def _measured(problem: Problem, tasks: Sequence[Task], iterations: int) -> tuple[dict[str, float], float, float]:
    """What the last of ``iterations`` needs at least, its period, and when its compute ended."""
    ends = [dict.fromkeys(Resource, 0.0) for _ in range(iterations + 1)]
    for task in tasks:
        of = ends[task.iteration]
        if task.end > of[task.resource]:
            of[task.resource] = task.end
    least = _least(problem, tasks, iterations)
    before, last = ends[iterations - 2 : iterations]
    return least, max(*(last[r] - before[r] for r in Resource), *least.values()), last[Resource.COMPUTE]


def _least(problem: Problem, tasks: Sequence[Task], iterations: int) -> dict[str, float]:
    return least_seconds(problem, [task for task in tasks if task.iteration == iterations - 1])


def reload_period(problem: Problem, evictions: Sequence[Eviction]) -> float:
    """Seconds per iteration of a plan that moves only weights to the device."""
    count = len(problem.ticks)
    issues = {eviction.gap: eviction.issue for eviction in evictions}
    needed: list[list[tuple[int, float]]] = [[] for _ in problem.ticks]
    for gap in need_order(problem, issues):
        tick = gap.before % count
        released = issues[gap] - gap.before + tick - 1  # the tick that must have ended; < 0: of the iteration before
        needed[tick].append((released, problem.reload_seconds[gap.weight]))
    work = [(tick.seconds, copies) for tick, copies in zip(problem.ticks, needed, strict=True)]
    ends = [0.0] * count
    clock = 0.0
    arrived = 0.0
    grown = (0.0, 0.0)
    for iteration in range(MOST_ITERATIONS):
        new = [0.0] * count
        before = (clock, arrived)
        for index, (seconds, copies) in enumerate(work):
            for released, duration in copies:
                ready = new[released] if released >= 0 else ends[released]
                arrived = (arrived if arrived > ready else ready) + duration
            if copies and arrived > clock:
                clock = arrived
            clock += seconds
            new[index] = clock
        ends = new
        was = grown
        grown = (clock - before[0], arrived - before[1])
        if iteration > 1 and all(abs(a - b) <= SAME * clock for a, b in zip(grown, was, strict=True)):
            break
    return max(grown)


def _critical(last: Task, start: float) -> dict[Resource, float]:
    """Seconds per resource along the critical path that ends with ``last``, back to ``start``."""
    found, task = dict.fromkeys(Resource, 0.0), last
    while True:
        found[task.resource] += task.end - max(task.start, start)
        if task.start <= start or task.cause is None:
            return found
        task = task.cause


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, ascending and without overlaps: two copies may run in one direction."""
    found: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if found and low < found[-1][1]:
            before = found.pop()
            low, high = before[0], max(before[1], high)
        found.append((low, high))
    return found


def _overlap(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Seconds that both cover; each is ascending and without overlaps."""
    first, total = 0, 0.0
    for low, high in spans:
        while first < len(others) and others[first][1] <= low:
            first += 1
        at = first
        while at < len(others) and others[at][0] < high:
            total += min(high, others[at][1]) - max(low, others[at][0])
            at += 1
    return total
