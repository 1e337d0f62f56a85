"""Policies of other systems, as plans for the same simulator. Each is a model from its description, not its code.

A model leaves out what makes the system slower than its policy (host synchronisation, pageable copies, allocator
traffic) and what makes it faster than this outline. It shows how good a policy can be on a machine, with every copy at
the speed of the link; it does not measure the systems themselves, and every label says so.

Policies differ in the sites of updates (``UpdateCosts``), in when updates run (serially, between backward and forward:
``SerialUpdates``), and in which weights are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from strategies.core.facts import Home
from strategies.core.layout import Site
from strategies.planner.greedy import check_fits, issue
from strategies.planner.problem import Eviction, Gap, Problem, Update, Weight, at_need, memory
from strategies.planner.simulate import Outcome, simulate
from strategies.planner.tasks import TaskBuilder

FEW = 10  # buckets of which all sets are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCosts:
    """What updates cost, per byte of weights.

    Args:
        host, device: seconds of the CPU's kernel and of the device's.
        grad, state: bytes of gradient and of optimizer state (bf16 with fp32 master and Adam: 1 and 6).
    """

    host: float
    device: float
    grad: float = 1.0
    state: float = 6.0

    def at(self, weight: Weight, site: Site, grad_home: Home = Home.DEVICE) -> Weight:
        """``weight``, updated at ``site``."""
        if site is Site.NONE:
            return replace(weight, update=None)
        seconds = weight.num_bytes * (self.host if site is Site.HOST else self.device)
        grad, state = round(self.grad * weight.num_bytes), round(self.state * weight.num_bytes)
        return replace(
            weight, update=Update(site=site, seconds=seconds, grad_bytes=grad, state_bytes=state, grad_home=grad_home)
        )


class SerialUpdates(TaskBuilder):
    """Tasks of an iteration whose updates all run between backward and forward, while nothing else runs."""

    def iteration(self, number: int) -> None:
        """The iteration, then its updates on the device; the next forward waits for all updates."""
        super().iteration(number)
        for weight in [weight for weight in self._order if weight in self._due]:
            self._update_on_device(weight, (number + 1) * self._problem.accumulation)
        updates = [*self._weight.values(), *(task for tasks in self._gate.values() for task in tasks)]
        self._gate.setdefault(self._users[0][0], []).extend(updates)


@dataclass(frozen=True, slots=True)
class Policy:
    """A model of what a system does: the problem with its sites, its evictions, and where the model is from.

    ``state_bytes`` is optimizer state that is always on the device; it is not part of the problem's ticks.
    """

    name: str
    source: str
    problem: Problem
    evictions: tuple[Eviction, ...]
    state_bytes: int = 0
    builder: type[TaskBuilder] = SerialUpdates

    @property
    def label(self) -> str:
        """For tables."""
        return f"model of {self.name}"

    @property
    def peak(self) -> int:
        """Bytes on the device at the worst tick."""
        return max(memory(self.problem, self.evictions)) + self.state_bytes

    @property
    def fits(self) -> bool:
        return self.peak <= self.problem.budget

    def outcome(self) -> Outcome:
        """How long an iteration takes, also if the policy does not fit."""
        return simulate(self.problem, self.evictions, builder=self.builder)


def zero_offload(problem: Problem, costs: UpdateCosts) -> Policy:
    """Weights stay; gradients go down under backward; the CPU updates all and weights go up; only then forward."""
    return Policy(
        "ZeRO-Offload, serial",
        "Ren et al., ZeRO-Offload, 2021: the cut that moves the least, without the delayed update",
        placed(problem, costs, lambda _: Site.HOST),
        (),
    )


def twin_flow(problem: Problem, costs: UpdateCosts, ratio: float) -> Policy:
    """The first ``ratio`` of the weights is updated by the CPU, the rest on the device meanwhile; then forward."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"a ratio of {ratio}; must be between 0 and 1")
    total, seen, hosted = sum(weight.num_bytes for weight in problem.weights), 0, set[int]()
    for index in sorted(range(len(problem.weights)), key=lambda i: problem.rank[i]):
        if seen < ratio * total:
            hosted.add(index)
        seen += problem.weights[index].num_bytes
    rest = sum(weight.num_bytes for index, weight in enumerate(problem.weights) if index not in hosted)
    return Policy(
        f"Twin-Flow, ratio {ratio:g}",
        "DeepSpeed ZeRO-Offload++: offload_optimizer.ratio, the first part of the weights on the CPU",
        placed(problem, costs, lambda index: Site.HOST if index in hosted else Site.DEVICE),
        (),
        state_bytes=round(costs.state * rest),
    )


def on_demand(problem: Problem, costs: UpdateCosts) -> Policy:
    """Everything rests on the host; weights come when they are used and leave after it; the CPU updates all."""
    return Policy(
        "all on the CPU, on demand",
        "Colossal-AI Gemini with placement cpu: whole-model placement, no prefetch",
        placed(problem, costs, lambda _: Site.HOST),
        at_need(problem.gaps),
    )


def whole_bucket(problem: Problem, builder: type[TaskBuilder] = TaskBuilder) -> Policy:
    """A bucket leaves whenever it is idle, or never; reloads are as early as memory allows; updates as in ``problem``.

    Raises:
        DoesNotFit: not even with all buckets leaving.
    """
    check_fits(problem)
    best: tuple[float, tuple[Eviction, ...]] | None = None
    for chosen in _bucket_sets(problem):
        plan = issue(problem, [gap for gap in problem.gaps if gap.weight in chosen])
        if plan is None:
            continue
        period = simulate(problem, plan, builder=builder).period
        if best is None or period < best[0]:
            best = (period, plan)
    assert best is not None, "all buckets leaving is one of the sets"
    source = "PatrickStar, Gemini, StrongHold: the chunk is the unit of the decision, not the gap"
    return Policy("whole buckets", source, problem, best[1], builder=builder)


def _bucket_sets(problem: Problem) -> list[set[int]]:
    """All sets of few buckets; of many, those that leave by the longest idle time, as far as they must and further."""
    idle: dict[int, float] = {}
    for gap in problem.gaps:
        idle[gap.weight] = idle.get(gap.weight, 0.0) + problem.idle_seconds(gap)
    if len(idle) <= FEW:
        return [set(some) for number in range(len(idle) + 1) for some in combinations(sorted(idle), number)]
    order = sorted(idle, key=lambda weight: (-idle[weight], problem.rank[weight]))
    least = 0
    while least < len(order) and not _fits(problem, set(order[:least])):
        least += 1
    return [set(order[:number]) for number in range(least, min(least + FEW, len(order)) + 1)]


def _fits(problem: Problem, chosen: set[int]) -> bool:
    gaps: list[Gap] = [gap for gap in problem.gaps if gap.weight in chosen]
    return max(memory(problem, at_need(gaps))) <= problem.budget


def placed(problem: Problem, costs: UpdateCosts, site: Callable[[int], Site]) -> Problem:
    """The problem with updates at these sites; gradients of host updates go down as they land."""
    weights = [
        costs.at(weight, site(index), Home.HOST if site(index) is Site.HOST else Home.DEVICE)
        for index, weight in enumerate(problem.weights)
    ]
    return replace(problem, weights=tuple(weights))
