"""Policies of other systems, as plans for the same simulator. Each is a model from its description, not its code.

A model leaves out what makes the system slower than its policy (host synchronisation, pageable copies, allocator
traffic) and what makes it faster than this outline. It shows how good a policy can be on a machine, with every copy at
the speed of the link; it does not measure the systems themselves.

Policies differ in the sites of updates (``UpdateCosts``), in when updates run, and in which weights are offloaded.
Updates run serially, between backward and forward, or begin in backward, as gradients land; the next forward waits for
all of them either way (``JoinedUpdates``). Beginning in backward means beginning before the norm is known: each such
policy says what it gives up for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from strategies.core.facts import HOST_UPDATE_BYTES, Home
from strategies.core.layout import Site
from strategies.planner.greedy import check_fits, issue
from strategies.planner.problem import Eviction, Gap, Problem, Update, Weight, at_need, memory
from strategies.planner.simulate import Outcome, simulate
from strategies.planner.step_cost import TOUCHED_BYTES
from strategies.planner.tasks import TaskBuilder

FEW = 10  # buckets of which all sets are tried
SLOTS = 2  # for gradients on their way down, and for visiting states
GRADIENT = 1  # bytes of a gradient that waits for the norm, per byte of weights
STATE = 6  # bytes of optimizer state per byte of weights: bf16 with fp32 master and Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCosts:
    """Seconds of an update per byte of weights, by the CPU's kernel and by the device's."""

    host: float
    device: float

    def at(self, weight: Weight, site: Site, index: int = 0) -> Weight:
        """The weight number ``index``, updated at ``site``; gradients of host updates go down as they land."""
        num_bytes, on_host = weight.num_bytes, site is Site.HOST
        update = Update(
            site=site,
            seconds=num_bytes * (self.host if on_host else self.device),
            touched_bytes=(HOST_UPDATE_BYTES if on_host else TOUCHED_BYTES) // 2 * num_bytes,  # two bytes per parameter
            grad_slot=index % SLOTS,
            visit_slot=index % SLOTS,
            grad_bytes=num_bytes,
            state_bytes=STATE * num_bytes,
            grad_home=Home.HOST if on_host else Home.DEVICE,
        )
        return replace(weight, update=update)


class JoinedUpdates(TaskBuilder):
    """Tasks of an iteration whose updates all end before the next forward begins."""

    def iteration(self, number: int) -> None:
        super().iteration(number)
        for weight in [weight for weight in self._order if weight in self._due]:
            self._update_on_device(weight, (number + 1) * self._problem.accumulation)
        updates = [*self._weight.values(), *(task for tasks in self._gate.values() for task in tasks)]
        self._gate.setdefault(self._users[0][0], []).extend(updates)


@dataclass(frozen=True)
class Policy:
    """A model of what a system does: the problem with its sites, and its evictions.

    Args:
        state_bytes: always on the device and not part of the problem's ticks: optimizer state, and the gradients that
            wait there for the norm.
        host_bytes: per parameter, where all state is on the host. From the systems' code and documents.
        gives_up: what plain training with clipping has and this has not.
    """

    problem: Problem
    evictions: tuple[Eviction, ...]
    state_bytes: int = 0
    builder: type[TaskBuilder] = JoinedUpdates
    host_bytes: int = 16
    gives_up: str = ""

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

    @cached_property
    def seconds(self) -> float:
        """Of one iteration."""
        return self.outcome().period

    def to_json(self) -> dict[str, object]:
        """Seconds, peak, host bytes per parameter, and what it gives up."""
        return {
            "seconds": self.seconds,
            "peak_bytes": self.peak,
            "host_bytes_per_parameter": self.host_bytes,
            "gives_up": self.gives_up,
        }


def zero_offload(problem: Problem, costs: UpdateCosts) -> Policy:
    """Weights stay; gradients go down under backward; the CPU updates all and weights go up; only then forward.

    Source: Ren et al., ZeRO-Offload, 2021: the cut that moves the least, without the delayed update.
    """
    return Policy(placed(problem, costs, lambda _: Site.HOST), ())


def twin_flow(problem: Problem, costs: UpdateCosts, ratio: float) -> Policy:
    """The first ``ratio`` of the weights is updated by the CPU, the rest on the device meanwhile; then forward.

    Source: DeepSpeed ZeRO-Offload++, ``offload_optimizer.ratio``.
    """
    problem, on_device = _divided(problem, costs, ratio, problem.rank)
    return Policy(problem, (), state_bytes=(STATE + GRADIENT) * on_device)


def super_offload(problem: Problem, costs: UpdateCosts, ratio: float) -> Policy:
    """The CPU updates as gradients land, before the norm is known, and undoes an update that was wrong; the weights
    whose gradients come last (1 - ``ratio``) are updated on the device.

    In its favour: 2 bytes per parameter in each direction, where its code sends 4, and no update is ever undone.

    Source: DeepSpeed SuperOffload (``superoffload_stage3.py``).
    """
    problem, on_device = _divided(problem, costs, ratio, [-rank for rank in problem.rank])
    gives_up = "bits, when it undoes a step; in its code, overlap when gradients are clipped"
    return Policy(replace(problem, in_backward=True), (), STATE * on_device, host_bytes=20, gives_up=gives_up)


def zen_flow(problem: Problem, costs: UpdateCosts, part: float = 0.1) -> Policy:
    """A ``part`` of each weight is updated on the device and the rest by the CPU, in every step: nothing is stale.

    Source: DeepSpeed ZenFlow with an update interval of 1, which is its exact part.
    """
    weights = tuple(
        costs.at(
            replace(weight, name=f"{weight.name}/{site.value}", num_bytes=int(share * weight.num_bytes)), site, index
        )
        for index, weight in enumerate(problem.weights)
        for site, share in ((Site.DEVICE, part), (Site.HOST, 1 - part))
    )
    state = int((STATE + GRADIENT) * part * sum(weight.num_bytes for weight in problem.weights))
    gives_up = "nothing at an interval of 1; at its default, updates that are 4 steps old"
    return Policy(replace(problem, weights=weights), (), state, host_bytes=32, gives_up=gives_up)


def mega_train(problem: Problem, costs: UpdateCosts) -> Policy:
    """Everything rests on the host; weights come one layer ahead; the CPU updates all after backward.

    In its favour: weights come up twice per step, where its checkpoints of several layers bring them three times.

    Source: MegaTrain (arXiv 2604.05091).
    """
    evictions = tuple(Eviction(gap, max(gap.before - 1, gap.after + 1)) for gap in problem.gaps)
    return Policy(placed(problem, costs, lambda _: Site.HOST), evictions, host_bytes=14, gives_up="fp32 master weights")


def prime_rl(problem: Problem, costs: UpdateCosts) -> Policy:
    """Weights stay; the CPU updates as gradients land; nothing is clipped.

    Source: prime-rl's full offload (``trainer/optim/offload.py``).
    """
    problem = replace(placed(problem, costs, lambda _: Site.HOST), in_backward=True)
    return Policy(problem, (), gives_up="clipping")


def _divided(problem: Problem, costs: UpdateCosts, ratio: float, order: Sequence[int]) -> tuple[Problem, int]:
    """The first weights by ``order``, up to ``ratio`` of the bytes, updated on the host; the bytes of the others."""
    sizes, hosted, seen = [weight.num_bytes for weight in problem.weights], set[int](), 0
    for index in sorted(range(len(sizes)), key=lambda i: order[i]):
        if seen < ratio * sum(sizes):
            hosted.add(index)
        seen += sizes[index]
    divided = placed(problem, costs, lambda index: Site.HOST if index in hosted else Site.DEVICE)
    return divided, sum(size for index, size in enumerate(sizes) if index not in hosted)


def on_demand(problem: Problem, costs: UpdateCosts) -> Policy:
    """Everything rests on the host; weights come when they are used and leave after it; the CPU updates all.

    Source: Colossal-AI Gemini with placement cpu: whole-model placement, no prefetch.
    """
    return Policy(placed(problem, costs, lambda _: Site.HOST), at_need(problem.gaps), host_bytes=14)


def whole_bucket(problem: Problem, builder: type[TaskBuilder] = TaskBuilder) -> Policy:
    """A bucket leaves whenever it is idle, or never; reloads are as early as memory allows; updates as in ``problem``.

    Source: PatrickStar, Gemini, StrongHold: the chunk is the unit of the decision, not the gap.

    Raises:
        DoesNotFit: not even with all buckets leaving.
    """
    check_fits(problem)
    plans = [issue(problem, _gaps(problem, chosen)) for chosen in _bucket_sets(problem)]
    policies = [Policy(problem, plan, builder=builder) for plan in plans if plan is not None]
    return min(policies, key=lambda policy: policy.seconds)  # all buckets leaving is one of them


def _bucket_sets(problem: Problem) -> list[set[int]]:
    """All sets of few buckets; of many, those that leave by the longest idle time, as far as they must and further."""
    idle: dict[int, float] = {}
    for gap in problem.gaps:
        idle[gap.weight] = idle.get(gap.weight, 0.0) + problem.idle_seconds(gap)
    if len(idle) <= FEW:
        return [set(some) for number in range(len(idle) + 1) for some in combinations(sorted(idle), number)]
    order = sorted(idle, key=lambda weight: (-idle[weight], problem.rank[weight]))
    sets = [set(order[:number]) for number in range(len(order) + 1)]
    least = next(
        n for n, some in enumerate(sets) if max(memory(problem, at_need(_gaps(problem, some)))) <= problem.budget
    )
    return sets[least : least + FEW + 1]


def _gaps(problem: Problem, weights: Collection[int]) -> list[Gap]:
    return [gap for gap in problem.gaps if gap.weight in weights]


def placed(problem: Problem, costs: UpdateCosts, site: Callable[[int], Site]) -> Problem:
    """The problem with updates at these sites."""
    weights = tuple(costs.at(weight, site(index), index) for index, weight in enumerate(problem.weights))
    return replace(problem, weights=weights)
