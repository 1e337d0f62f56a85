"""Tasks: what an iteration consists of, and what waits for what. The simulator carries them out.

    step        waits for the step before it, its items' reloads and new weights, and, where it makes a gradient that
                goes down, for a free slot
    reload      waits for the step before its issue, the reload needed before it, and the weight on the host
    gradient    goes down after the item's last use: once per pass where it rests on the host, else once per iteration
    update      waits for the gradient (``When.BACKWARD``), or for all of them, that is for the norm
    weight      a host update's new weight goes up; where the item is away, its reload is that copy
    visit       state comes up into one of a few slots, is updated, and goes down again
    return      a weight updated on the device goes down, if it leaves at all
    saved       what forward sends to the host goes down after its step; the step after the next one waits for it, since
                its memory is then used again. It comes up when backward of the next unit begins

The adding up of gradients on the host is not counted as work of the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from strategies.core.facts import Home
from strategies.core.layout import Site
from strategies.planner.problem import Eviction, Problem, Update, When, need_order


class Resource(Enum):
    """What works beside the others."""

    COMPUTE = "compute"
    UP = "link up"
    DOWN = "link down"
    CPU = "cpu"


class Task:
    """A piece of work: what it takes, how many tasks it waits for, and which tasks wait for it."""

    __slots__ = (
        "cause", "end", "iteration", "label", "num_bytes", "number", "priority", "resource", "seconds", "start", "then",
        "waits",
    )  # fmt: skip

    def __init__(self, resource: Resource, label: str, number: int, iteration: int) -> None:
        self.resource, self.label, self.number, self.iteration = resource, label, number, iteration
        self.seconds, self.num_bytes, self.waits = 0.0, 0, 0
        self.priority: tuple[int, ...] = (number,)
        self.then: list[Task] = []
        self.cause: Task | None = None
        self.start = self.end = 0.0


def build(problem: Problem, evictions: Sequence[Eviction], iterations: int) -> list[Task]:
    """All tasks of so many iterations, each after those it waits for."""
    builder = _Builder(problem, evictions)
    for iteration in range(iterations):
        builder.iteration(iteration)
    return builder.tasks


class _Builder:
    def __init__(self, problem: Problem, evictions: Sequence[Eviction]) -> None:
        self.tasks: list[Task] = []
        self._problem = problem
        self._at = 0
        self._issues = {eviction.gap: eviction.issue for eviction in evictions}
        self._needed: list[list[tuple[int, int]]] = [[] for _ in problem.steps]  # per step: item, step before issue
        for gap in need_order(problem, self._issues):
            step = gap.before % len(problem.steps)
            self._needed[step].append((gap.item, self._issues[gap] - gap.before + step - 1))
        self._leaves = {gap.item for gap in self._issues}
        self._away = {gap.item for gap in self._issues if gap.before >= len(problem.steps)}  # over the boundary
        order = sorted(range(len(problem.items)), key=lambda index: problem.rank[index])
        self._first: list[list[int]] = [
            [i for i in order if problem.items[i].uses[0] == s] for s in range(len(problem.steps))
        ]
        self._last: list[list[int]] = [
            [i for i in order if problem.items[i].uses[-1] == s] for s in range(len(problem.steps))
        ]
        self._users = [[i for i in order if s in problem.items[i].uses] for s in range(len(problem.steps))]
        self._order = order
        self._ends: list[Task | None] = [None] * len(problem.steps)  # the steps of the pass before
        self._compute: Task | None = None
        self._reload: Task | None = None
        self._gate: dict[int, list[Task]] = {}  # per item: what its next use waits for
        self._weight: dict[int, Task] = {}  # per item: what makes the host's copy current
        self._landed: dict[int, Task] = {}  # per item: its gradient on the host
        self._due: dict[int, list[Task]] = {}  # updates on the device before the next use, and what they wait for
        self._sent: deque[Task] = deque(maxlen=problem.grad_slots)
        self._visits: deque[Task] = deque(maxlen=problem.visit_slots)
        self._hold: list[Task] = []  # what the next step waits for in any case
        self._saved: dict[int, Task] = {}  # per forward step of this pass: what it saved, on its way down

    def _task(self, resource: Resource, label: str, after: Iterable[Task | None]) -> Task:
        task = Task(resource, label, len(self.tasks), self._at)
        for before in {id(t): t for t in after if t is not None}.values():
            before.then.append(task)
            task.waits += 1
        self.tasks.append(task)
        return task

    def _copy(self, resource: Resource, label: str, num_bytes: int, after: Iterable[Task | None]) -> Task:
        task = self._task(resource, label, after)
        task.num_bytes = num_bytes
        return task

    def _work(self, label: str, seconds: float, after: Iterable[Task | None]) -> Task:
        """Compute, after all compute before it."""
        self._compute = self._task(Resource.COMPUTE, label, (self._compute, *after))
        self._compute.seconds = seconds
        return self._compute

    def iteration(self, number: int) -> None:
        """One iteration: its passes, then what is left of its updates."""
        self._at = number
        passes = self._problem.accumulation
        for index in range(number * passes, (number + 1) * passes):
            self._pass(index, is_last=index + 1 == (number + 1) * passes)
        if self._problem.when is not When.BACKWARD:
            for item in self._order:
                self._submit(item, self._compute, (number + 1) * passes)  # the last step: the norm is known
        if self._problem.when is When.SERIAL:
            for item in [item for item in self._order if item in self._due]:
                self._update_on_device(item, (number + 1) * passes)
            self._hold = [*self._weight.values(), *(task for tasks in self._gate.values() for task in tasks)]

    def _pass(self, number: int, *, is_last: bool) -> None:
        before, self._ends = self._ends, [None] * len(self._ends)
        for step, todo in enumerate(self._problem.steps):
            for item, released in self._needed[step]:
                self._bring(item, self._ends[released] if released >= 0 else before[released], (number, step))
            for item in [item for item in self._first[step] if item in self._due]:
                self._update_on_device(item, number)
            waits = [task for item in self._users[step] for task in self._gate.pop(item, [])]
            waits += self._saved_of(step, number)
            ending = [item for item in self._last[step] if self._sends(item, is_last)]
            slots = [self._sent[0]] if ending and len(self._sent) == self._problem.grad_slots else []
            made = self._work(todo.name, todo.seconds, (*waits, *slots, *self._hold))
            self._hold, self._ends[step] = [], made
            if todo.hosted_bytes:
                self._saved[step] = self._copy(Resource.DOWN, f"saved by {todo.name}", todo.hosted_bytes, [made])
            for item in ending:
                label = f"gradient {self._problem.items[item].name}"
                self._landed[item] = self._copy(Resource.DOWN, label, self._update(item).grad_bytes, [made])
                self._sent.append(self._landed[item])
            if is_last and self._problem.when is When.BACKWARD:
                for item in self._last[step]:
                    self._submit(item, made, number)
                    if item in self._due:
                        self._update_on_device(item, number)

    def _saved_of(self, step: int, number: int) -> Iterator[Task]:
        """What ``step`` waits for of the tensors that wait on the host: those that leave, those that it needs."""
        count = len(self._problem.steps)
        if step <= count // 2 and step - 2 in self._saved:
            yield self._saved[step - 2]
        sent = self._saved.pop(count - 1 - step, None) if step >= count // 2 else None
        if sent is not None:
            later = (sent, self._ends[step - 2])  # backward of the next unit begins when that of the one after ends
            up = self._copy(Resource.UP, f"saved for {self._problem.steps[step].name}", sent.num_bytes, later)
            up.priority = (number, step, -1)
            yield up

    def _update(self, item: int) -> Update:
        update = self._problem.items[item].update
        assert update is not None
        return update

    def _sends(self, item: int, is_last: bool) -> bool:
        update = self._problem.items[item].update
        return update is not None and update.sends_down and (is_last or update.grad_home is Home.HOST)

    def _bring(self, item: int, ended: Task | None, need: tuple[int, int]) -> None:
        """The reload that the step ``need`` waits for."""
        info = self._problem.items[item]
        self._reload = self._copy(
            Resource.UP, f"weight {info.name}", info.num_bytes, (ended, self._reload, self._weight.get(item))
        )
        self._reload.priority = (*need, self._problem.rank[item])
        self._gate.setdefault(item, []).append(self._reload)

    def _submit(self, item: int, gradient: Task | None, used_in: int) -> None:
        """All that the update of ``item`` needs is made by ``gradient``; the next pass that uses it is ``used_in``."""
        info = self._problem.items[item]
        if info.update is None or info.update.site is Site.NONE:
            return
        waits = [task for task in (gradient, self._landed.get(item)) if task is not None]
        if info.update.site is not Site.HOST:
            self._due[item] = waits
            return
        task = self._task(Resource.CPU, f"update {info.name}", waits)
        task.seconds = info.update.seconds
        task.priority = (self._at, info.uses[0], self._problem.rank[item])
        self._weight[item] = task
        if item not in self._away:
            sent = self._copy(Resource.UP, f"new weight {info.name}", info.num_bytes, [task])
            sent.priority = (used_in + 1, info.uses[0], self._problem.rank[item])
            self._gate.setdefault(item, []).append(sent)

    def _update_on_device(self, item: int, number: int) -> None:
        """The kernel; around it the visit of the state, and after it the way back of the weight."""
        info, update, waits = self._problem.items[item], self._update(item), self._due.pop(item)
        gate = self._gate.get(item, [])
        if update.site is Site.STREAMED:
            early = self._problem.when is When.BACKWARD  # state may come before its gradient is there
            slot = self._visits[0] if len(self._visits) == self._problem.visit_slots else None
            down = update.grad_home is Home.HOST
            size = update.state_bytes + (update.grad_bytes if down else 0)
            visit = self._copy(Resource.UP, f"state {info.name}", size, (slot, *([] if early and not down else waits)))
            visit.priority = (number, info.uses[-1] if early else info.uses[0], self._problem.rank[item])
            gate = [*gate, visit]
        done = self._work(f"update {info.name}", update.seconds, (*gate, *waits))
        self._gate.pop(item, None)
        if update.site is Site.STREAMED:
            self._visits.append(self._copy(Resource.DOWN, f"state {info.name}", update.state_bytes, [done]))
        if item in self._leaves:
            self._weight[item] = self._copy(Resource.DOWN, f"weight {info.name}", info.num_bytes, [done])
