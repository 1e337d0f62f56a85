"""The simulated machine: ready tasks in queues, running ones that share memories, and when the next one ends.

Each queue runs one task at a time: compute, the CPU, and two queues of copies per direction, since saved tensors have
streams of their own. What a task needs at full speed is known: a compute task its seconds, a copy its bytes at the rate
of the link. Tasks that run together use the same media:

    link up, link down   by the copies of that direction; while bytes move in both, each has ``duplex`` of its rate.
                         Exchanges by way of the host use both
    DRAM                 copies, one byte per byte; updates of the CPU; gradients that it adds; exchanges by way of the
                         host, which are written and read
    device memory        copies, one byte per byte; updates on the device; such exchanges, likewise
    cores                everything, where there is no accelerator

If the tasks together need more of a medium than it has, all its users slow down by the same factor, so that it is used
in full and no more. A task that uses several media has the smallest of their factors. Rates change only when a task
begins or ends, or the latency of a copy is over. Compute by matrix products is not limited by memory, and neither is a
batch of a few megabytes on its way up: both are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from strategies.planner.problem import Problem
from strategies.planner.tasks import COPIES, Resource, Task

Queue: TypeAlias = tuple[Resource, int]
UP, DOWN, DRAM, DEVICE, CORES = range(5)  # the media


class _Running:
    """A task in progress: first its latency, then the seconds that it takes at full speed, at a speed that may change.

    ``needs`` are (medium, units per second at full speed). ``end`` is when its latency ends, then when it does.
    """

    __slots__ = ("end", "moving", "needs", "speed", "task")

    def __init__(self, task: Task, now: float, latency: float, needs: Sequence[tuple[int, float]]) -> None:
        self.task, self.needs, self.speed = task, needs, 1.0
        self.moving = not latency
        self.end = now + (latency or task.seconds)

    def begin(self, now: float) -> None:
        """The latency is over."""
        self.moving, self.end = True, now + self.task.seconds

    def at(self, speed: float, now: float) -> None:
        """It goes on at another ``speed``."""
        self.end = now + (self.end - now) * self.speed / speed
        self.speed = speed


class SimulatedMachine:
    """Queues of tasks whose waits are over, and the running ones."""

    def __init__(self, problem: Problem) -> None:
        link, shared = problem.link, problem.shared
        self._latency, self._duplex, self._cores = link.latency, link.duplex, shared.cores
        self._capacity = (link.up, link.down, shared.dram, shared.device, 1.0)
        self._ready: dict[Queue, list[tuple[tuple[int, ...], int, Task]]] = {}
        self._running: dict[Queue, _Running] = {}

    def offer(self, task: Task) -> None:
        """Queue ``task``: everything it waits for has ended."""
        heappush(self._ready.setdefault((task.resource, task.stream), []), (task.priority, task.number, task))

    def start(self, now: float) -> None:
        """Start the next ready task of each idle queue, and set the speed of all that run."""
        for queue, ready in self._ready.items():
            if ready and queue not in self._running:
                task = heappop(ready)[2]
                task.start = now
                latency = self._latency if task.resource in COPIES else 0.0
                self._running[queue] = _Running(task, now, latency, self._needs(task))
        self._share(now)

    def next_time(self) -> float | None:
        """When the next task or latency ends; None if nothing runs."""
        return min([one.end for one in self._running.values()], default=None)

    def finish(self, now: float) -> list[Task]:
        """The tasks that have ended by ``now``."""
        done = []
        for queue, one in list(self._running.items()):
            if one.end > now:
                continue
            if not one.moving:
                one.begin(now)
            if one.end <= now:
                one.task.end = now
                del self._running[queue]
                done.append(one.task)
        return done

    def _needs(self, task: Task) -> list[tuple[int, float]]:
        """What ``task`` needs of each medium per second at full speed."""
        if not task.seconds:
            return []
        found = [(CORES, 1.0)] if self._cores else []
        if task.resource in COPIES:
            found.append((UP if task.resource is Resource.UP else DOWN, task.num_bytes / task.seconds))
        if task.resource is Resource.NET and task.num_bytes:
            found += [(medium, task.num_bytes / task.seconds) for medium in (UP, DOWN)]
        found += [(medium, size / task.seconds) for medium, size in media(task) if size]
        return found

    def _share(self, now: float) -> None:
        """Set the speed of every running task."""
        load = [0.0] * len(self._capacity)
        moving = [one for one in self._running.values() if one.moving]
        for one in moving:
            for medium, need in one.needs:
                load[medium] += need
        both = self._duplex if load[UP] and load[DOWN] else 1.0
        slower: dict[int, float] = {}  # of media that all together need more of than there is
        for medium, (has, wanted) in enumerate(zip(self._capacity, load, strict=True)):
            if wanted:
                rate = has * both if medium <= DOWN else has
                if wanted > rate:
                    slower[medium] = rate / wanted
        for one in moving:
            speed = min([slower.get(medium, 1.0) for medium, _ in one.needs], default=1.0) if slower else 1.0
            if speed != one.speed:
                one.at(speed, now)


def media(task: Task) -> tuple[tuple[int, int], ...]:
    """The memories that ``task`` uses, and how many bytes of each."""
    if task.resource in COPIES:
        return (DRAM, task.num_bytes), (DEVICE, task.num_bytes)
    if task.resource is Resource.NET:
        return (DRAM, 2 * task.num_bytes), (DEVICE, 2 * task.num_bytes)
    return ((DRAM if task.resource is Resource.CPU else DEVICE, task.touched_bytes),)


def least_seconds(problem: Problem, tasks: Sequence[Task]) -> dict[str, float]:
    """Lower bounds on the time of ``tasks``: what each resource needs by itself, and each memory for all of them."""
    found = {resource.value: 0.0 for resource in Resource}
    bytes_of = {DRAM: 0, DEVICE: 0}
    for task in tasks:
        found[task.resource.value] += task.seconds
        if task.resource is Resource.NET:
            found[Resource.UP.value] += task.num_bytes / problem.link.up
            found[Resource.DOWN.value] += task.num_bytes / problem.link.down
        for medium, size in media(task):
            bytes_of[medium] += size
    found["DRAM"] = bytes_of[DRAM] / problem.shared.dram
    found["device memory"] = bytes_of[DEVICE] / problem.shared.device
    if problem.shared.cores:
        found["cores"] = sum(found[resource.value] for resource in Resource)
    return found


def run(tasks: Sequence[Task], problem: Problem) -> None:
    """Set start and end of all ``tasks``, and what each one waited for last."""
    machine, now, left = SimulatedMachine(problem), 0.0, len(tasks)
    for task in tasks:
        if not task.waits:
            machine.offer(task)
    previous: dict[Queue, Task] = {}
    while True:
        machine.start(now)
        then = machine.next_time()
        if then is None:
            break
        now = then
        for task in machine.finish(now):
            left -= 1
            queue = (task.resource, task.stream)
            before = previous.get(queue)
            if task.cause is None or (before is not None and before.end > task.cause.end):
                task.cause = before
            previous[queue] = task
            for later in task.then:
                later.waits -= 1
                later.cause = task  # the last one to end is what it waited for
                if not later.waits:
                    machine.offer(later)
    assert left == 0, f"{left} tasks wait for each other"
