"""The simulator: how long one iteration of a plan takes, and why. Used for our plans and for other systems' policies.

Four resources work independently: compute, the link up, the link down, and the CPU.

    compute   ticks in order, and updates on the device; a tick waits for its weights
    up        reloads, new weights from the CPU, visiting states; of those that are ready, the one needed first. Reloads
              keep the order of need among themselves
    down      gradients, visiting states, weights updated on the device that will leave; in the order they are made
    CPU       updates on the host; of those that are ready, that of the lowest block: the next forward needs it first

A copy has its latency, during which it disturbs no other copy, then its bytes. While bytes move in both directions,
both rates are multiplied by the link's ``duplex``. Time is event-driven, not slotted: a task starts when everything it
waits for has ended and its resource is free.

The period is how much later the slowest resource finishes from one iteration to the next, once several have run: a
resource that falls behind limits the period in the long run, even while compute does not wait for it yet.

``reload_period`` gives the same period for plans that move weights only, without a trace, in O(ticks + evictions) per
iteration: the search calls it thousands of times. Tests hold the two equal. ``tasks.py`` lists the tasks of an
iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from strategies.planner.problem import Eviction, Link, Problem, need_order
from strategies.planner.tasks import Resource, Task, TaskBuilder, build_tasks

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
        events: of the measured iteration, by start.
    """

    period: float
    busy: Mapping[Resource, float]
    hidden: Mapping[Resource, float]
    critical: Mapping[Resource, float]
    events: tuple[TraceEvent, ...]

    @property
    def binds(self) -> Resource:
        """The resource with the largest part of the critical path."""
        return max(Resource, key=lambda resource: self.critical[resource])


def simulate(
    problem: Problem,
    evictions: Sequence[Eviction],
    iterations: int = 4,
    builder: type[TaskBuilder] = TaskBuilder,
) -> Outcome:
    """How long ``evictions`` take, measured on the last of ``iterations`` (at least 3).

    Args:
        builder: makes the tasks of an iteration.
    """
    if iterations < 3:
        raise ValueError(f"{iterations} iterations; the first two are not like the others")
    # One iteration more: its first copies run in the measured one.
    tasks = build_tasks(problem, evictions, iterations + 1, builder)
    _run(tasks, problem.link)
    ends = [
        {r: max((t.end for t in tasks if t.resource is r and t.iteration == at), default=0.0) for r in Resource}
        for at in (iterations - 2, iterations - 1)
    ]
    period = max(ends[1][r] - ends[0][r] for r in Resource)
    end = ends[1][Resource.COMPUTE]
    start = end - period
    within = [t for t in tasks if t.end > start and t.start < end]
    spans = {r: [(max(t.start, start), min(t.end, end)) for t in within if t.resource is r] for r in Resource}
    last = max((t for t in tasks if t.resource is Resource.COMPUTE and t.end == end), key=lambda t: t.start)
    events = [TraceEvent(t.resource, t.start - start, t.end - start, t.label) for t in within if t.end > t.start]
    return Outcome(
        period=period,
        busy={r: sum(high - low for low, high in spans[r]) for r in Resource},
        hidden={r: _overlap(spans[r], spans[Resource.COMPUTE]) for r in Resource},
        critical=_critical(last, start),
        events=tuple(sorted(events, key=lambda event: (event.start, event.resource.value, event.label))),
    )


def reload_period(problem: Problem, evictions: Sequence[Eviction]) -> float:
    """Seconds per iteration of a plan that moves only weights to the device."""
    count = len(problem.ticks)
    issues = {eviction.gap: eviction.issue for eviction in evictions}
    needed: list[list[tuple[int, float]]] = [[] for _ in problem.ticks]
    for gap in need_order(problem, issues):
        tick = gap.before % count
        released = issues[gap] - gap.before + tick - 1  # the tick that must have ended; < 0: of the iteration before
        needed[tick].append((released, problem.link.up_seconds(problem.weights[gap.weight].num_bytes)))
    work = [(tick.seconds, copies) for tick, copies in zip(problem.ticks, needed, strict=True)]
    ends, clock, arrived = [0.0] * count, 0.0, 0.0
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
        ends, was, grown = new, grown, (clock - before[0], arrived - before[1])
        if iteration > 1 and all(abs(a - b) <= SAME * clock for a, b in zip(grown, was, strict=True)):
            break
    return max(grown)


class _Copy:
    """A copy in progress: first its latency, then its bytes at a rate that may change."""

    def __init__(self, task: Task, now: float, latency: float) -> None:
        self.task, self.moving = task, False
        self._since, self._left, self._rate = now, latency, 1.0

    @property
    def end(self) -> float:
        """When the latency ends, then when the bytes have arrived."""
        return self._since + self._left / self._rate

    def begin(self, now: float) -> None:
        """The latency is over."""
        self.moving = True
        self._since, self._left = now, float(self.task.num_bytes)

    def at(self, rate: float, now: float) -> None:
        """Bytes move at ``rate`` from now on."""
        if rate != self._rate:
            self._left -= (now - self._since) * self._rate if self._since < now else 0.0
            self._since, self._rate = now, rate


class _Machine:
    """Ready tasks per resource, and the running ones."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ready: dict[Resource, list[tuple[tuple[int, ...], int, Task]]] = {r: [] for r in Resource}
        self._works: dict[Resource, Task] = {}
        self._copies: dict[Resource, _Copy] = {}
        self._rates = {Resource.UP: link.up, Resource.DOWN: link.down}

    def offer(self, task: Task) -> None:
        """Queue ``task``: everything it waits for has ended."""
        heappush(self._ready[task.resource], (task.priority, task.number, task))

    def start(self, now: float) -> None:
        """Start the next ready task of each idle resource."""
        for resource, ready in self._ready.items():
            if not ready or resource in self._works or resource in self._copies:
                continue
            task = heappop(ready)[2]
            task.start = now
            if resource in self._rates:
                self._copies[resource] = _Copy(task, now, self._link.latency)
            else:
                self._works[resource] = task
                task.end = now + task.seconds

    def next_time(self) -> float | None:
        """When the next task or latency ends; None if nothing runs."""
        ends = [task.end for task in self._works.values()] + [copy.end for copy in self._copies.values()]
        return min(ends, default=None)

    def finish(self, now: float) -> list[Task]:
        """The tasks that have ended by ``now``."""
        done = [(resource, task) for resource, task in self._works.items() if task.end <= now]
        for resource, _ in done:
            del self._works[resource]
        for resource, copy in list(self._copies.items()):
            if copy.end > now:
                continue
            if not copy.moving:
                copy.begin(now)
            if copy.end <= now:
                copy.task.end = now
                del self._copies[resource]
                done.append((resource, copy.task))
        both = len(self._copies) == len(self._rates) and all(copy.moving for copy in self._copies.values())
        for resource, copy in self._copies.items():
            if copy.moving:
                copy.at(self._rates[resource] * (self._link.duplex if both else 1.0), now)
        return [task for _, task in done]


def _run(tasks: Sequence[Task], link: Link) -> None:
    """Set start and end of all tasks."""
    machine, now, left = _Machine(link), 0.0, len(tasks)
    for task in tasks:
        if not task.waits:
            machine.offer(task)
    previous: dict[Resource, Task] = {}
    while True:
        machine.start(now)
        then = machine.next_time()
        if then is None:
            break
        now = then
        for task in machine.finish(now):
            left -= 1
            before = previous.get(task.resource)
            if task.cause is None or (before is not None and before.end > task.cause.end):
                task.cause = before
            previous[task.resource] = task
            for later in task.then:
                later.waits -= 1
                later.cause = task  # the last one to end is what it waited for
                if not later.waits:
                    machine.offer(later)
    assert left == 0, f"{left} tasks wait for each other"


def _critical(last: Task, start: float) -> dict[Resource, float]:
    """Seconds per resource along the critical path that ends with ``last``, back to ``start``."""
    found, task = dict.fromkeys(Resource, 0.0), last
    while True:
        found[task.resource] += task.end - max(task.start, start)
        if task.start <= start or task.cause is None:
            return found
        task = task.cause


def _overlap(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Seconds that both cover; spans within one sequence do not overlap."""
    mine, theirs, total = sorted(spans), sorted(others), 0.0
    first = 0
    for low, high in mine:
        while first < len(theirs) and theirs[first][1] <= low:
            first += 1
        at = first
        while at < len(theirs) and theirs[at][0] < high:
            total += min(high, theirs[at][1]) - max(low, theirs[at][0])
            at += 1
    return total
