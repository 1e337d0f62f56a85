"""Tasks: what an iteration consists of and what each part waits for. ``simulate.py`` schedules them.

tick        waits for the tick before it, its weights' reloads and new values, and the slots of the gradients that it
            makes: until what was there before has gone down
reload      waits for the tick before its issue, the reload needed before it, the weight on the host, and new weights
            at the same addresses that still go down
gradient    goes down after the weight's last use: once per pass if it rests on the host, else once per iteration.
            Compute goes on when its slot is free; where it has none, when it is on the host
sum         a further micro-batch's gradient that rests on the host is added there by the CPU
update      waits for its gradient (``in_backward``), or for all of them, because it needs the norm. On the device it
            runs before the next use of its weight, or ``in_backward`` at once if weight and state never leave. One that
            makes a weight from its master on the device takes the place of the reload before it
weight      the new weight of a host update goes up; if the weight is away, its reload is that copy
disk        state that rests there is read once the update is submitted and its slot in the window is free, and written
            after the update; a weight before each reload, once its slot is free, and written after its update, before
            the slot of its gradient is free. Reads and writes are queues
visit       state comes up into one of a few slots, is updated, and goes down again
return      a weight updated on the device goes down if it leaves at all
exchange    of a bucket that ranks share: a reload, and a new weight, is followed by the other ranks' parts, unless it
            brought them from the host; a gradient goes to its owners before it goes down or is used for an update
saved       tensors that forward sends to the host go down after its tick; the tick after the next one waits for
            that, because it uses their memory again. They come up when backward of the next unit begins. Both are
            on streams of their own
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Site
from deepstow.strategies.planner.problem import Eviction, Problem, Tick, Update, Weight, need_order


class Resource(Enum):
    """What works in parallel to the others."""

    __hash__ = object.__hash__  # by identity; Enum's own looks the name up each time

    COMPUTE = "compute"
    UP = "link up"
    DOWN = "link down"
    CPU = "cpu"
    NET = "network"
    DISK = "disk"


COPIES = (Resource.UP, Resource.DOWN)
SUM_NUMBERS = 3  # that adding a gradient touches per element: two are read, one is written


class Task:
    """One piece of work: its size, how many tasks it waits for, and which tasks wait for it.

    ``seconds`` are those at full speed, ``num_bytes`` those that cross a link. ``stream`` tells apart queues of one
    resource.
    """

    __slots__ = (
        "cause", "end", "iteration", "label", "moving", "needs", "num_bytes", "number", "priority", "resource",
        "seconds", "speed", "start", "stream", "then", "touched_bytes", "waits",
    )  # fmt: skip

    def __init__(self, resource: Resource, label: str, number: int, iteration: int) -> None:
        self.resource = resource
        self.label = label
        self.number = number
        self.iteration = iteration
        self.seconds = self.start = self.end = 0.0
        self.num_bytes = self.touched_bytes = self.waits = self.stream = 0
        self.priority: tuple[int, ...] = ()
        self.then: list[Task] = []
        self.cause: Task | None = None
        # Of the machine that runs it: whether its latency is over, what it uses, and how fast it is.
        self.moving = False
        self.speed = 1.0
        self.needs: tuple[tuple[int, float], ...] = ()


class TaskBuilder:
    """Appends the tasks of one iteration after the other."""

    def __init__(self, problem: Problem, evictions: Sequence[Eviction]) -> None:
        self.tasks: list[Task] = []
        self._problem = problem
        self._at = 0
        count, weights = len(problem.ticks), problem.weights
        issues = {eviction.gap: eviction.issue for eviction in evictions}
        self._needed: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # per tick: weight, tick before issue
        for gap in need_order(problem, issues):
            tick = gap.before % count
            self._needed[tick].append((gap.weight, issues[gap] - gap.before + tick - 1))
        self._leaves = {gap.weight for gap in issues} | {i for i, weight in enumerate(weights) if weight.on_host}
        self._away = {gap.weight for gap in issues if gap.before >= count}  # over the boundary
        self._order = sorted(range(len(weights)), key=lambda index: problem.rank[index])
        # Per tick: the weights whose first use it is, whose gradients are complete after it, and all that it uses.
        self._first, self._done, self._users = ([list[int]() for _ in range(count)] for _ in range(3))
        for index in self._order:
            uses = weights[index].uses
            self._first[uses[0]].append(index)
            self._done[weights[index].gradient_at].append(index)
            for tick in dict.fromkeys(uses):
                self._users[tick].append(index)
        # Per tick, in the last pass and in others: the weights whose gradients leave their memory after it.
        self._ending = {
            last: [[w for w in done if self._sends(w, last)] for done in self._done] for last in (True, False)
        }
        self._ends: list[Task | None] = [None] * count  # the ticks of the pass before
        self._compute: Task | None = None
        self._reload: Task | None = None
        self._gate: dict[int, list[Task]] = {}  # per weight: what its next use waits for
        self._weight: dict[int, Task] = {}  # per weight: what makes the host's copy current
        self._leaving: dict[int, Task] = {}  # per weight that was updated on the device: its last copy down
        # Per weight that its update makes: what its addresses wait for.
        self._vacated: dict[int, list[Task | None]] = {}
        self._landed: dict[int, Task] = {}  # per weight: its gradient on the host
        self._due: dict[int, list[Task]] = {}  # updates on the device before the next use, and what they wait for
        self._slots: dict[int | None, Task] = {}  # per slot: after which task it is free
        self._slot: Task | None = None  # what compute waits for: a place for the gradient that it has just made
        self._saved: dict[int, Task] = {}  # per forward tick of this pass: the copy down of what it saved

    def _task(self, resource: Resource, label: str, after: Iterable[Task | None]) -> Task:
        tasks = self.tasks
        task = Task(resource, label, len(tasks), self._at)
        for earlier in after:
            if earlier is not None:
                followers = earlier.then
                if not followers or followers[-1] is not task:  # it may be among them more than once
                    followers.append(task)
                    task.waits += 1
        tasks.append(task)
        return task

    def _copy(self, resource: Resource, label: str, num_bytes: int, after: Iterable[Task | None]) -> Task:
        task, link = self._task(resource, label, after), self._problem.link
        task.num_bytes = num_bytes
        task.seconds = num_bytes / (link.up if resource is Resource.UP else link.down)
        return task

    def _exchange(self, label: str, num_bytes: int, after: Task, slowdown: float = 1.0) -> Task:
        """With the other ranks; ``after`` itself if there is nothing to exchange."""
        if not num_bytes:
            return after
        task = self._task(Resource.NET, label, [after])
        task.seconds = slowdown * num_bytes / self._problem.shared.network
        task.num_bytes = num_bytes * self._problem.shared.through_host
        return task

    def _to_owners(self, name: str, update: Update, after: Task) -> Task:
        return self._exchange(f"gradient {name}", update.exchange_bytes, after, self._problem.shared.sums)

    def _gather(self, info: Weight, after: Task) -> Task:
        """The other ranks' parts of a weight, unless they came from the host too."""
        return self._exchange(f"gather {info.name}", info.gathered_bytes, after)

    def _work(self, label: str, seconds: float, after: Iterable[Task | None]) -> Task:
        """A task of compute, after all compute before it."""
        self._compute = self._task(Resource.COMPUTE, label, (self._compute, self._slot, *after))
        self._compute.seconds = seconds
        self._slot = None
        return self._compute

    def _occupy(self, slot: int | None, until: Task) -> None:
        if slot is not None:
            self._slots[slot] = until

    def iteration(self, number: int) -> None:
        """One iteration: its passes, then what is left of its updates."""
        self._at = number
        passes = self._problem.accumulation
        for index in range(number * passes, (number + 1) * passes):
            self._pass(index, is_last=index + 1 == (number + 1) * passes)
        if not self._problem.in_backward:
            for weight in self._order:
                self._submit(weight, self._compute, (number + 1) * passes)  # the last tick: the norm is known

    def _pass(self, number: int, *, is_last: bool) -> None:
        ends_before, self._ends = self._ends, [None] * len(self._ends)
        for tick, todo in enumerate(self._problem.ticks):
            for weight, released in self._needed[tick]:
                self._bring(weight, self._ends[released] if released >= 0 else ends_before[released], (number, tick))
            for weight in self._first[tick]:
                if weight in self._due:
                    self._update_on_device(weight, number)
            waits = [task for weight in self._users[tick] if weight in self._gate for task in self._gate.pop(weight)]
            if self._saved:
                waits += self._saved_of(tick, number)
            ending = self._ending[is_last][tick]
            compute = self._tick(todo, waits, ending, is_first=number % self._problem.accumulation == 0)
            self._ends[tick] = compute
            for weight in self._done[tick] if is_last else ():
                update = self._problem.weights[weight].update
                if update is not None and update.exchange_bytes and weight not in ending:
                    name = self._problem.weights[weight].name
                    self._landed[weight] = self._to_owners(name, update, compute)
            if todo.hosted_bytes:
                self._saved[tick] = self._copy(Resource.DOWN, f"saved by {todo.name}", todo.hosted_bytes, [compute])
                self._saved[tick].stream = 1
            if is_last and self._problem.in_backward:
                for weight in self._done[tick]:
                    self._submit(weight, compute, number)
                    if weight in self._due and self._stays(weight):
                        self._update_on_device(weight, number)

    def _tick(self, tick: Tick, waits: Sequence[Task], ending: Sequence[int], *, is_first: bool) -> Task:
        """The compute of ``tick``, in as many parts as it makes gradients that go down; returns the last one.

        A gradient is made first and then moved to its slot, so it is compute after it that waits for the slot.
        """
        parts, seconds = reversed(ending), tick.seconds / max(1, len(ending))
        compute = self._work(tick.name, seconds, waits)
        for index, weight in enumerate(parts):
            if index:
                compute = self._work(tick.name, seconds, ())
            self._send(weight, compute, is_first=is_first)
        return compute

    def _saved_of(self, tick: int, number: int) -> Iterator[Task]:
        """Copies of saved tensors that ``tick`` waits for: down, to reuse their memory, and up, if it needs them."""
        count = len(self._problem.ticks)
        if tick <= count // 2 and tick - 2 in self._saved:
            yield self._saved[tick - 2]
        sent = self._saved.pop(count - 1 - tick, None) if tick >= count // 2 else None
        if sent is not None:
            later = (sent, self._ends[tick - 2])  # backward of the next unit begins when that of the one after it ends
            up = self._copy(Resource.UP, f"saved for {self._problem.ticks[tick].name}", sent.num_bytes, later)
            up.priority = (number, tick, -1)
            up.stream = 1
            yield up

    def _send(self, weight: int, made: Task, *, is_first: bool) -> None:
        """The gradient of one pass that ``made`` has computed goes to its owners, and down if it waits there; if it is
        not the first, the CPU adds it.
        """
        update, name = self._update(weight), self._problem.weights[weight].name
        slot = update.parked_slot if is_first or update.arrival_slot is None else update.arrival_slot
        self._slot = self._slots.get(update.grad_slot)
        at_owners = self._to_owners(name, update, made)
        down = at_owners
        if update.sends_down:
            waits = (at_owners, self._slot, self._slots.get(slot))
            down = self._copy(Resource.DOWN, f"gradient {name}", update.grad_bytes, waits)
        self._occupy(update.grad_slot, down)
        if update.grad_direct:
            self._slot = down
        self._landed[weight] = down
        if update.grad_tier is Tier.HOST and not is_first:
            added = self._task(Resource.CPU, f"sum {name}", [down])
            added.touched_bytes = SUM_NUMBERS * update.grad_bytes
            added.seconds = added.touched_bytes / self._problem.shared.dram  # the CPU is as fast as its memory
            added.priority = (self._at, -1, self._problem.rank[weight])
            self._occupy(slot, added)
            self._landed[weight] = added

    def _update(self, weight: int) -> Update:
        update = self._problem.weights[weight].update
        assert update is not None
        return update

    def _stays(self, weight: int) -> bool:
        """Whether an update on the device needs no copies."""
        return weight not in self._leaves and self._update(weight).site is Site.DEVICE

    def _sends(self, weight: int, is_last: bool) -> bool:
        update = self._problem.weights[weight].update
        return update is not None and update.leaves_slot and (is_last or update.grad_tier is Tier.HOST)

    def _bring(self, weight: int, ended: Task | None, need: tuple[int, int]) -> None:
        """The reload that the tick ``need`` waits for, unless the update that comes first makes the weight."""
        info = self._problem.weights[weight]
        last_copies = self._leaving
        leaving = [last_copies[other] for other in info.overlapping if other in last_copies] if last_copies else []
        if weight in self._due and self._update(weight).from_master:
            self._vacated[weight] = [ended, *leaving]
            return
        on_host = self._weight.get(weight) if info.disk_slot is None else self._read(weight, need)
        after = (ended, self._reload, on_host, *leaving)
        due = weight in self._due  # an update here of this rank's part, which the others get afterwards
        size = info.link_bytes if due else info.reload_bytes
        self._reload = self._copy(Resource.UP, f"weight {info.name}", size, after)
        self._reload.seconds += self._problem.decode_seconds(info)
        self._reload.priority = (*need, self._problem.rank[weight])
        self._occupy(info.disk_slot, self._reload)
        gathered = self._reload if due else self._gather(info, self._reload)
        self._gate.setdefault(weight, []).append(gathered)

    def _submit(self, weight: int, gradient: Task | None, used_in: int) -> None:
        """Add the update of ``weight``, which waits for ``gradient``; the next pass that uses it is ``used_in``."""
        info = self._problem.weights[weight]
        if info.update is None or info.update.site is Site.NONE:
            return
        waits = [task for task in (gradient, self._landed.get(weight)) if task is not None]
        if info.update.site is not Site.HOST:
            self._due[weight] = waits
            return
        if info.update.disk_bytes:
            waits.append(self._state(weight, 0, (gradient, self._slots.get(info.update.window_slot))))
        current = task = self._task(Resource.CPU, f"update {info.name}", waits)
        if info.update.disk_bytes:
            self._occupy(info.update.window_slot, self._state(weight, 1, [task]))
        task.seconds = info.update.seconds
        task.touched_bytes = info.update.touched_bytes
        task.priority = (self._at, info.uses[0], self._problem.rank[weight])
        if size := info.update.rewritten_bytes:
            current = self._disk(f"write weight {info.name}", size, 1, [task])
            current.priority = task.priority
        self._occupy(info.update.parked_slot, current)
        self._weight[weight] = current
        if weight not in self._away:
            need = (used_in + 1, info.uses[0])
            current = task if info.disk_slot is None else self._read(weight, need)
            sent = self._copy(Resource.UP, f"new weight {info.name}", info.reload_bytes, [current])
            sent.priority = (*need, self._problem.rank[weight])
            self._occupy(info.disk_slot, sent)
            self._gate.setdefault(weight, []).append(self._gather(info, sent))

    def _state(self, weight: int, writes: int, after: Iterable[Task | None]) -> Task:
        """State is read from the disk, or written to it."""
        info, label = self._problem.weights[weight], "write state" if writes else "read state"
        task = self._disk(f"{label} {info.name}", self._update(weight).disk_bytes, writes, after)
        task.priority = (self._at, info.uses[0], self._problem.rank[weight])
        return task

    def _read(self, weight: int, need: tuple[int, int]) -> Task:
        """A weight that rests on the disk is read into its slot, for the tick ``need``."""
        info = self._problem.weights[weight]
        waits = (self._weight.get(weight), self._slots.get(info.disk_slot))
        task = self._disk(f"read weight {info.name}", info.disk_bytes, 0, waits)
        task.priority = (*need, self._problem.rank[weight])
        return task

    def _disk(self, label: str, num_bytes: int, writes: int, after: Iterable[Task | None]) -> Task:
        task = self._task(Resource.DISK, label, after)
        task.num_bytes = num_bytes
        task.stream = writes
        task.seconds = task.num_bytes / self._problem.shared.disk[writes]
        return task

    def _update_on_device(self, weight: int, number: int) -> None:
        """The kernel; around it the visit of the state, and after it the copy of the weight to the host."""
        info = self._problem.weights[weight]
        update = self._update(weight)
        waits = self._due.pop(weight)
        gate, vacated = self._gate.get(weight, []), self._vacated.pop(weight, [])
        if update.site is Site.STREAMED:
            slot = self._slots.get(update.visit_slot)
            hosted = update.grad_tier is Tier.HOST
            size = update.state_bytes + (update.grad_bytes if hosted else 0)
            visit = self._copy(Resource.UP, f"state {info.name}", size, (slot, *waits))
            visit.priority = (number, info.uses[0], self._problem.rank[weight])
            gate = [*gate, visit]
        kernel = self._work(f"update {info.name}", update.seconds, (*gate, *vacated, *waits))
        kernel.touched_bytes = update.touched_bytes
        self._gate.pop(weight, None)
        if info.exchange_bytes:
            self._gate[weight] = [self._exchange(f"gather {info.name}", info.exchange_bytes, kernel)]
        if update.site is Site.STREAMED:
            state = self._copy(Resource.DOWN, f"state {info.name}", update.state_bytes, [kernel])
            self._occupy(update.visit_slot, state)
        if weight in self._leaves:
            down = self._copy(Resource.DOWN, f"weight {info.name}", info.link_bytes, [kernel])
            self._weight[weight] = self._leaving[weight] = down


def build_tasks(problem: Problem, evictions: Sequence[Eviction], iterations: int) -> list[Task]:
    """All tasks of so many iterations, each after those it waits for."""
    builder = TaskBuilder(problem, evictions)
    for iteration in range(iterations):
        builder.iteration(iteration)
    return builder.tasks
