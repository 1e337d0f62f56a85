"""The simulator: how long one iteration of a plan takes, and why.

Compute, the link up and down, the CPU, the network and the disk work at the same time (``tasks.py`` says what they do,
and what each task waits for), and share the memories that they read and write. Of the copies up that are ready, the one
needed first goes first, reloads in the order of need; of updates by the CPU that of the lowest block, which the next
forward needs first. Time is event-driven, not slotted. Each queue runs one task at a time: compute, the CPU, and two
queues of copies per direction, since saved tensors have streams of their own. Tasks that run together use the same
media:

    link up, link down   by the copies of that direction; while bytes move in both, each has ``duplex`` of its rate.
                         Exchanges by way of the host use both
    DRAM                 copies, one byte per byte; updates of the CPU; gradients that it adds; exchanges by way of the
                         host, which are written and read
    device memory        copies, one byte per byte; updates on the device; such exchanges, likewise
    disk                 reads and writes of state, a part each; of both at once it does ``disk_overlap``
    cores                everything but that, where there is no accelerator

If they need more of a medium than it has, all its users slow down by the same factor, so that it is used in full; a
task that uses several media has the smallest of their factors. Rates change only when a task begins or ends, or the
latency of a copy, during which it disturbs nothing else, is over. Compute by matrix products is not limited by memory,
and neither is a batch of a few megabytes on its way up: both are left out.

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
from functools import cache
from heapq import heappop, heappush
from math import inf
from typing import TypeAlias

from deepstow.strategies.planner.problem import Eviction, Problem, need_order
from deepstow.strategies.planner.tasks import COPIES, Resource, Task, build_tasks

SAME = 1e-9  # times that differ by less, relatively, are taken as equal
MOST_ITERATIONS = 40
UP, DOWN, DRAM, DEVICE, CORES, DISK = range(6)  # the media
Needs: TypeAlias = tuple[tuple[int, float], ...]  # of a task: a medium, and what of it per second at full speed


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
    least = least_seconds(problem, tasks, iterations)
    period, end = _measured(tasks, iterations, least)
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
    least = least_seconds(problem, tasks, iterations)
    if (longest := max(least.values())) > most:
        return longest
    run(tasks, problem, iterations)
    return _measured(tasks, iterations, least)[0]


def _measured(tasks: Sequence[Task], iterations: int, least: Mapping[str, float]) -> tuple[float, float]:
    """The period of the last of ``iterations``, which needs ``least``, and when its compute ended."""
    ends = [dict.fromkeys(Resource, 0.0) for _ in range(iterations + 1)]
    for task in tasks:
        of = ends[task.iteration]
        if task.end > of[task.resource]:
            of[task.resource] = task.end
    previous, last = ends[iterations - 2 : iterations]
    return max(*(last[r] - previous[r] for r in Resource), *least.values()), last[Resource.COMPUTE]


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
        new_ends = [0.0] * count
        at_start = (clock, arrived)
        for index, (seconds, copies) in enumerate(work):
            for released, duration in copies:
                ready = new_ends[released] if released >= 0 else ends[released]
                arrived = (arrived if arrived > ready else ready) + duration
            if copies and arrived > clock:
                clock = arrived
            clock += seconds
            new_ends[index] = clock
        ends = new_ends
        grown_before = grown
        grown = (clock - at_start[0], arrived - at_start[1])
        if iteration > 1 and all(abs(a - b) <= SAME * clock for a, b in zip(grown, grown_before, strict=True)):
            break
    return max(grown)


def _critical(last: Task, start: float) -> dict[Resource, float]:
    """Seconds per resource along the critical path that ends with ``last``, back to ``start``."""
    seconds, task = dict.fromkeys(Resource, 0.0), last
    while True:
        seconds[task.resource] += task.end - max(task.start, start)
        if task.start <= start or task.cause is None:
            return seconds
        task = task.cause


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, ascending and without overlaps: two copies may run in one direction."""
    joined: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if joined and low < joined[-1][1]:
            previous = joined.pop()
            low, high = previous[0], max(previous[1], high)
        joined.append((low, high))
    return joined


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


# --- the machine -----------------------------------------------------------------------------------------------------


class _Queue:
    """Ready tasks in order of priority, whether one runs, and the one that ended last."""

    __slots__ = ("busy", "latency", "previous", "ready")

    def __init__(self, latency: float) -> None:
        self.ready: list[tuple[tuple[int, ...], int, Task]] = []
        self.busy = False
        self.latency = latency
        self.previous: Task | None = None


class SimulatedMachine:
    """What tasks need of the media, and how fast those are that run together."""

    def __init__(self, problem: Problem) -> None:
        link, shared = problem.link, problem.shared
        self._duplex = link.duplex
        self._cores = shared.cores
        self._capacity = (link.up, link.down, shared.dram, shared.device, 1.0, shared.disk_overlap)
        self._needs = cache(self._needs_of)
        self._speeds: dict[tuple[int, ...], list[float]] = {}  # of tasks that run together, by the ids of their needs

    def move(self, task: Task, now: float) -> bool:
        """The latency of ``task`` is over, if it has one. Whether it uses a medium from now on."""
        task.moving = True
        task.end = now + task.seconds
        task.needs = self._needs(task.resource, task.seconds, task.num_bytes, task.touched_bytes)
        return task.needs != ()

    def set_speeds(self, tasks: Sequence[Task], now: float) -> None:
        """Of all that use media at the same time; a step has many that do so together."""
        together = tuple([id(task.needs) for task in tasks])
        speeds = self._speeds.get(together)
        if speeds is None:
            speeds = self._speeds[together] = self._shared([task.needs for task in tasks])
        for task, speed in zip(tasks, speeds, strict=True):
            if speed != task.speed:
                task.end = now + (task.end - now) * task.speed / speed
                task.speed = speed

    def _needs_of(self, resource: Resource, seconds: float, num_bytes: int, touched_bytes: int) -> Needs:
        """What a task needs of each medium per second at full speed."""
        if not seconds:
            return ()
        needs = [(CORES, 1.0)] if self._cores and resource is not Resource.DISK else []
        needs += [(DISK, 1.0)] if resource is Resource.DISK else []
        if resource in COPIES:
            needs.append((UP if resource is Resource.UP else DOWN, num_bytes / seconds))
        if resource is Resource.NET and num_bytes:
            needs += [(medium, num_bytes / seconds) for medium in (UP, DOWN)]
        used = media(resource, num_bytes, touched_bytes)
        return tuple(needs + [(medium, size / seconds) for medium, size in used if size])

    def _shared(self, tasks: Sequence[Needs]) -> list[float]:
        """The speeds of tasks that run together and need so much; those that need no medium are never slower."""
        load = [0.0] * len(self._capacity)
        for needs in tasks:
            for medium, need in needs:
                load[medium] += need
        duplex = self._duplex if load[UP] and load[DOWN] else 1.0
        factors, slower = [1.0] * len(load), False  # of media that all together need more of than there is
        for medium, demand in enumerate(load):
            rate = self._capacity[medium] * duplex if medium <= DOWN else self._capacity[medium]
            if demand > rate:
                factors[medium], slower = rate / demand, True
        return [min([factors[medium] for medium, _ in needs]) if slower else 1.0 for needs in tasks]


def media(resource: Resource, num_bytes: int, touched_bytes: int) -> tuple[tuple[int, int], ...]:
    """The memories that a task uses, and how many bytes of each."""
    if resource in COPIES:
        return (DRAM, num_bytes), (DEVICE, num_bytes)
    if resource is Resource.NET:
        return (DRAM, 2 * num_bytes), (DEVICE, 2 * num_bytes)
    if resource is Resource.DISK:
        return ((DRAM, num_bytes),)
    return ((DRAM if resource is Resource.CPU else DEVICE, touched_bytes),)


def least_seconds(problem: Problem, tasks: Sequence[Task], iterations: int) -> dict[str, float]:
    """Lower bounds on the last of ``iterations``: what each resource needs by itself, and each memory for all tasks."""
    seconds = {resource.value: 0.0 for resource in Resource}
    bytes_of = {DRAM: 0, DEVICE: 0}
    for task in (task for task in tasks if task.iteration == iterations - 1):
        seconds[task.resource.value] += task.seconds
        if task.resource is Resource.NET:
            seconds[Resource.UP.value] += task.num_bytes / problem.link.up
            seconds[Resource.DOWN.value] += task.num_bytes / problem.link.down
        for medium, size in media(task.resource, task.num_bytes, task.touched_bytes):
            bytes_of[medium] += size
    seconds[Resource.DISK.value] /= problem.shared.disk_overlap
    seconds["DRAM"] = bytes_of[DRAM] / problem.shared.dram
    seconds["device memory"] = bytes_of[DEVICE] / problem.shared.device
    if problem.shared.cores:
        seconds["cores"] = sum(seconds[resource.value] for resource in Resource if resource is not Resource.DISK)
    return seconds


def run(tasks: Sequence[Task], problem: Problem, iterations: float = inf) -> None:
    """Set start and end of all ``tasks`` of so many ``iterations``, and what each one waited for last.

    A running task has first its latency, then the seconds that it takes at full speed, at a speed that may change:
    ``needs`` is empty until it uses a medium, and ``end`` is when its latency ends, then when it does.
    """
    machine, now, changed = SimulatedMachine(problem), 0.0, False  # whether other tasks use media than before
    queues: dict[tuple[Resource, int], _Queue] = {}
    running: list[tuple[Task, _Queue]] = []
    unfinished, ready = sum(task.iteration < iterations for task in tasks), [task for task in tasks if not task.waits]
    ended = True  # whether a task may begin
    while unfinished:
        for task in ready:
            queue = queues.get((task.resource, task.stream))
            if queue is None:
                latency = problem.link.latency if task.resource in COPIES else 0.0
                queue = queues[task.resource, task.stream] = _Queue(latency)
            heappush(queue.ready, (task.priority, task.number, task))
        for queue in queues.values() if ended else ():
            if queue.ready and not queue.busy:
                task = heappop(queue.ready)[2]
                task.start = now
                task.end = now + queue.latency
                queue.busy = True
                running.append((task, queue))
                if not queue.latency and machine.move(task, now):
                    changed = True
        if changed:
            machine.set_speeds([task for task, _ in running if task.needs], now)
        assert running, f"{unfinished} tasks wait for each other"
        now = min([task.end for task, _ in running])
        changed = False
        ended = False
        ready = []
        going = []
        for pair in running:
            task, queue = pair
            if task.end > now:
                going.append(pair)
                continue
            if not task.moving:
                changed |= machine.move(task, now)
                if task.end > now:
                    going.append(pair)
                    continue
            if task.needs:
                changed = True
            previous, cause = queue.previous, task.cause
            if cause is None or (previous is not None and previous.end > cause.end):
                task.cause = previous
            task.end = now
            queue.busy = False
            queue.previous = task
            ended = True
            unfinished -= task.iteration < iterations
            for later in task.then:
                later.waits -= 1
                later.cause = task  # the last one to end is what it waited for
                if not later.waits:
                    ready.append(later)
            task.then = []  # tasks that refer to each other would stay until the next search for cycles
        running = going
