"""The planning problem in numbers: one iteration's steps, the items that they use, the link, and the budget.

Problem. A model is larger than the device. Which weights leave when they are idle, and when do they come back?

An iteration has steps 0..S-1: forward of each block, then backward in reverse (with what is recomputed). An item is
used at some of them and idle in between: a *gap*. An item used at FP_i and BP_i has two per iteration: the turn (FP_i
to BP_i, long for early blocks, spans the peak of activations) and the boundary (BP_i to the next FP_i, long for late
blocks). The unit of decision is (item, gap), not the item; ``peers.whole_bucket`` is what that gains over.

Steps are counted on into the next iteration: a gap that spans the boundary has ``before`` >= S. An item that leaves in
a gap and whose copy is issued at step ``issue`` is absent on after < s < issue. Memory is counted in steps, so that it
holds whatever the real timing: at each step, what is present + what the step itself needs <= budget.

The copy starts when step issue - 1 has ended and the copies needed before it have arrived; the step ``before`` waits
for it. Leaving is free: the host has the weight, or gets it once per iteration after an update on the device.

Invariant. Everything here is a number or a tuple of numbers; equal problems have equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

from strategies.core.facts import Home
from strategies.core.layout import Site


class When(Enum):
    """When updates run."""

    BACKWARD = "as gradients land"
    FORWARD = "under the next forward"  # after the norm of all gradients; exact clipping
    SERIAL = "between backward and forward"  # how other systems do it: nothing else runs meanwhile


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an iteration: seconds of compute, bytes on the device that are not weights, and, in forward, bytes of
    what it saves that wait on the host until the backward of the same unit.
    """

    name: str
    seconds: float
    num_bytes: int
    hosted_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How an item is updated: once per iteration.

    Args:
        seconds: of the CPU where ``site`` is the host, else of the device.
        grad_bytes: go down after the item's last use, where its update or its gradient is on the host.
        state_bytes: come up before and go down after a streamed update.
    """

    site: Site
    seconds: float
    grad_bytes: int = 0
    state_bytes: int = 0
    grad_home: Home = Home.DEVICE

    @property
    def sends_down(self) -> bool:
        """Whether the gradient crosses the link."""
        return self.grad_bytes > 0 and (self.site is Site.HOST or self.grad_home is Home.HOST)


@dataclass(frozen=True, slots=True)
class Weight:
    """A bucket: its bytes on the device while present, and the steps that use it, ascending. No update: frozen."""

    name: str
    num_bytes: int
    uses: tuple[int, ...]
    update: Update | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Host to device (up) and back (down): seconds before the first byte, then bytes per second.

    ``duplex`` is what is left of either rate while bytes move in both directions; 1: they do not disturb each other.
    """

    latency: float
    up: float
    down: float
    duplex: float = 1.0

    def up_seconds(self, num_bytes: int) -> float:
        """Of a copy to the device that nothing disturbs."""
        return self.latency + num_bytes / self.up


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """The steps ``after`` < s < ``before`` on which an item is idle; ``before`` may lie in the next iteration."""

    item: int
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """An item leaves in ``gap``; its way back is issued when step ``issue`` - 1 has ended."""

    gap: Gap
    issue: int


@dataclass(frozen=True)
class Problem:
    """One iteration and the machine it runs on.

    Args:
        budget: bytes on the device for weights and for what steps need. What is always there is not part of it.
        accumulation: passes over the steps per update.
        grad_slots, visit_slots: gradients on their way down and states that visit, at a time.
    """

    steps: tuple[Step, ...]
    items: tuple[Weight, ...]
    link: Link
    budget: int
    accumulation: int = 1
    when: When = When.FORWARD
    grad_slots: int = 2
    visit_slots: int = 2

    def __post_init__(self) -> None:
        for item in self.items:
            uses = item.uses
            if not uses or list(uses) != sorted(set(uses)) or not 0 <= uses[0] <= uses[-1] < len(self.steps):
                raise ValueError(f"{item.name}: used at {uses} of {len(self.steps)} steps")
        if self.link.up <= 0 or self.link.down <= 0 or not 0 < self.link.duplex <= 1 or self.link.latency < 0:
            raise ValueError(f"not a link: {self.link}")

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Every gap with an idle step in it, ascending; the same order, whatever the order of the items."""
        count = len(self.steps)
        found = [
            Gap(index, after, before)
            for index, item in enumerate(self.items)
            if item.num_bytes
            for after, before in zip(item.uses, (*item.uses[1:], item.uses[0] + count), strict=True)
            if before - after > 1
        ]
        return tuple(sorted(found, key=lambda gap: (gap.after, gap.before, self.rank[gap.item])))

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Place of each item in an order that does not depend on the one they are given in."""
        items = self.items
        order = sorted(range(len(items)), key=lambda i: (items[i].uses, items[i].num_bytes, items[i].name))
        return tuple(sorted(range(len(items)), key=order.__getitem__))

    @cached_property
    def compute_seconds(self) -> float:
        """Of one pass, where nothing waits."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def moves_weights_only(self) -> bool:
        """Whether reloads are all that crosses the link: no updates to account for."""
        saved = sum(step.hosted_bytes for step in self.steps)
        return all(item.update is None for item in self.items) and self.accumulation == 1 and not saved

    def idle_seconds(self, gap: Gap) -> float:
        """Compute while the gap lasts."""
        clock = self._clock
        return clock[gap.before] - clock[gap.after + 1]

    @cached_property
    def _clock(self) -> tuple[float, ...]:
        twice = [step.seconds for step in self.steps] * 2
        return tuple(accumulate(twice, initial=0.0))

    @cached_property
    def all_present(self) -> tuple[int, ...]:
        """Bytes per step, if nothing leaves."""
        weights = sum(item.num_bytes for item in self.items)
        return tuple(step.num_bytes + weights for step in self.steps)


def need_order(problem: Problem, gaps: Iterable[Gap]) -> list[Gap]:
    """Gaps by the step of one iteration that needs the item back."""
    count, rank = len(problem.steps), problem.rank
    return sorted(gaps, key=lambda gap: (gap.before % count, rank[gap.item]))


def memory(problem: Problem, evictions: Iterable[Eviction]) -> list[int]:
    """Bytes on the device per step."""
    count = len(problem.steps)
    change = [0] * (2 * count + 1)
    for eviction in evictions:
        size = problem.items[eviction.gap.item].num_bytes
        change[eviction.gap.after + 1] -= size
        change[eviction.issue] += size
    absent = list(accumulate(change))
    return [here + absent[step] + absent[step + count] for step, here in enumerate(problem.all_present)]


def at_need(gaps: Iterable[Gap]) -> tuple[Eviction, ...]:
    """Each reload issued as late as can be: when the step before its use has ended."""
    return tuple(Eviction(gap, gap.before) for gap in gaps)


def stays(problem: Problem, evictions: Sequence[Eviction]) -> list[tuple[tuple[int, int], ...]]:
    """Per item the half-open ranges of steps, within one iteration, on which it is present; ascending."""
    count = len(problem.steps)
    absent: list[set[int]] = [set() for _ in problem.items]
    for eviction in evictions:
        absent[eviction.gap.item].update(s % count for s in range(eviction.gap.after + 1, eviction.issue))
    return [_ranges([step not in away for step in range(count)]) for away in absent]


def _ranges(present: list[bool]) -> tuple[tuple[int, int], ...]:
    found, start = [], None
    for step, here in enumerate([*present, False]):
        if here and start is None:
            start = step
        elif not here and start is not None:
            found.append((start, step))
            start = None
    return tuple(found)


def complaints(problem: Problem, evictions: Sequence[Eviction]) -> list[str]:
    """Everything wrong with a plan: gaps that are none, issues outside their gap, too much memory."""
    known = set(problem.gaps)
    found = [f"{e.gap}: not a gap of this problem" for e in evictions if e.gap not in known]
    found += [f"{e.gap}: issued at {e.issue}" for e in evictions if not e.gap.after < e.issue <= e.gap.before]
    if len({eviction.gap for eviction in evictions}) < len(evictions):
        found.append("a gap is evicted twice")
    if found:
        return found
    used = memory(problem, evictions)
    return [
        f"{step.name}: {here} bytes, {here - problem.budget} too much"
        for step, here in zip(problem.steps, used, strict=True)
        if here > problem.budget
    ]
