"""Policies of other systems, as plans for the same simulator. Each is a model from its description, not its code.

A model leaves out what makes the system slower than its policy (host synchronisation, pageable copies, allocator
traffic) and what makes it faster than this outline. It says how good a policy can be on a machine, with every copy at
the speed of the link; it is no measurement of anybody's software, and every label says so.

``UpdateCosts`` turns the problem's items into items that are updated at a given site: policies differ in sites, in
when updates run, and in which weights travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from strategies.core.facts import Home
from strategies.core.layout import Site
from strategies.planner.greedy import DoesNotFit, issue
from strategies.planner.problem import Eviction, Gap, Problem, Update, Weight, When, at_need, memory
from strategies.planner.simulate import Outcome, simulate

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

    def at(self, item: Weight, site: Site, grad_home: Home = Home.DEVICE) -> Weight:
        """``item``, updated at ``site``."""
        if site is Site.NONE:
            return replace(item, update=None)
        seconds = item.num_bytes * (self.host if site is Site.HOST else self.device)
        grad, state = round(self.grad * item.num_bytes), round(self.state * item.num_bytes)
        return replace(
            item, update=Update(site=site, seconds=seconds, grad_bytes=grad, state_bytes=state, grad_home=grad_home)
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """A model of what a system does: the problem with its sites, its evictions, and where the model is from.

    ``held_bytes`` is optimizer state that rests on the device all the time; it is not part of the problem's steps.
    """

    name: str
    source: str
    problem: Problem
    evictions: tuple[Eviction, ...]
    held_bytes: int = 0

    @property
    def label(self) -> str:
        """For tables."""
        return f"model of {self.name}"

    @property
    def peak(self) -> int:
        """Bytes on the device at the worst step."""
        return max(memory(self.problem, self.evictions)) + self.held_bytes

    @property
    def fits(self) -> bool:
        return self.peak <= self.problem.budget

    def outcome(self) -> Outcome:
        """Its price; asked of policies that do not fit, too."""
        return simulate(self.problem, self.evictions)


def zero_offload(problem: Problem, costs: UpdateCosts) -> Policy:
    """Weights stay; gradients go down under backward; the CPU updates all and weights go up; only then forward."""
    return Policy(
        "ZeRO-Offload, serial",
        "Ren et al., ZeRO-Offload, 2021: the cut that moves the least, without the delayed update",
        _placed(problem, costs, lambda _: Site.HOST),
        (),
    )


def twin_flow(problem: Problem, costs: UpdateCosts, ratio: float) -> Policy:
    """The first ``ratio`` of the weights is updated by the CPU, the rest on the device meanwhile; then forward."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"a ratio of {ratio}; must be between 0 and 1")
    total, seen, hosted = sum(item.num_bytes for item in problem.items), 0, set[int]()
    for index in sorted(range(len(problem.items)), key=lambda i: problem.rank[i]):
        if seen < ratio * total:
            hosted.add(index)
        seen += problem.items[index].num_bytes
    held = sum(item.num_bytes for index, item in enumerate(problem.items) if index not in hosted)
    return Policy(
        f"Twin-Flow, ratio {ratio:g}",
        "DeepSpeed ZeRO-Offload++: offload_optimizer.ratio, the first part of the weights on the CPU",
        _placed(problem, costs, lambda index: Site.HOST if index in hosted else Site.DEVICE),
        (),
        held_bytes=round(costs.state * held),
    )


def on_demand(problem: Problem, costs: UpdateCosts) -> Policy:
    """Everything rests on the host; weights come when they are used and leave after it; the CPU updates all."""
    return Policy(
        "all on the CPU, on demand",
        "Colossal-AI Gemini with placement cpu: whole-model placement, no prefetch",
        _placed(problem, costs, lambda _: Site.HOST),
        at_need(problem.gaps),
    )


def whole_bucket(problem: Problem) -> Policy:
    """A bucket leaves whenever it is idle, or never; reloads are as early as memory allows; updates as they are.

    Raises:
        DoesNotFit: not even with all buckets leaving.
    """
    best: tuple[float, tuple[Eviction, ...]] | None = None
    for chosen in _bucket_sets(problem):
        plan = issue(problem, [gap for gap in problem.gaps if gap.item in chosen])
        if plan is None:
            continue
        price = simulate(problem, plan).period
        if best is None or price < best[0]:
            best = (price, plan)
    if best is None:
        least = memory(problem, at_need(problem.gaps))
        worst = max(range(len(least)), key=least.__getitem__)
        raise DoesNotFit(problem.steps[worst].name, least[worst] - problem.budget)
    source = "PatrickStar, Gemini, StrongHold: the chunk is the unit of the decision, not the gap"
    return Policy("whole buckets", source, problem, best[1])


def _bucket_sets(problem: Problem) -> list[set[int]]:
    """All sets of few buckets; of many, those that leave by the longest idle time, as far as they must and further."""
    idle: dict[int, float] = {}
    for gap in problem.gaps:
        idle[gap.item] = idle.get(gap.item, 0.0) + problem.idle_seconds(gap)
    if len(idle) <= FEW:
        return [set(some) for number in range(len(idle) + 1) for some in combinations(sorted(idle), number)]
    order = sorted(idle, key=lambda item: (-idle[item], problem.rank[item]))
    least = 0
    while least < len(order) and not _fits(problem, set(order[:least])):
        least += 1
    return [set(order[:number]) for number in range(least, min(least + FEW, len(order)) + 1)]


def _fits(problem: Problem, chosen: set[int]) -> bool:
    gaps: list[Gap] = [gap for gap in problem.gaps if gap.item in chosen]
    return max(memory(problem, at_need(gaps))) <= problem.budget


def _placed(problem: Problem, costs: UpdateCosts, site: Callable[[int], Site]) -> Problem:
    """The problem with updates at these sites, between backward and forward; gradients go down as they land."""
    items = [
        costs.at(item, site(index), Home.HOST if site(index) is Site.HOST else Home.DEVICE)
        for index, item in enumerate(problem.items)
    ]
    return replace(problem, items=tuple(items), when=When.SERIAL)
