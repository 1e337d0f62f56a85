"""Hybrid parallelism of a chain of unlike layers: which layers form a stage, on how many ranks, split in which way.

With t of a stage and c of a boundary the seconds of one micro-batch, forward and backward, a synchronous step (1F1B or
GPipe) takes

    T = sum t + sum c + (M - 1) max(t, c) + max exposed sync

where a stage's gradients are summed once per step and the backward of its last micro-batch hides a part of that. A rank
holds the stage's state, and what forward saves of min(M, stages to come + 1) micro-batches.

``least_total`` is exact (P2): for each bound on the slowest stage and on the exposed sync it finds the least sum by
dynamic programming over (layer, ranks left, stages to come); the last index is there because memory depends on it.
``least_bottleneck`` (P1) is the recurrence of EffTra and PipeDream,

    A[j][k] = min over i < j, r <= k, mode:  max(A[i][k - r], c(i), t(i, j, r) + sync(i, j, r) / M)

It minimises the rhythm of a pipeline that never drains and knows no memory; it is kept to compare with.

Sources: "Training Acceleration for Deep Neural Networks: A Hybrid Parallelization Strategy", DAC 2021 (P1); Zheng et
al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", 2022 (the form of P2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from math import inf

from strategies.planner.hybrid.cluster import Cluster


class Mode(Enum):
    """What the ranks of a stage split."""

    DATA = "each micro-batch"
    TENSOR = "every layer"
    ZERO = "the micro-batch and the optimizer's state (stage 1)"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, per micro-batch and on one rank where nothing else is said; times in seconds."""

    forward: float
    backward: float
    weight_bytes: float  # and as many of its gradients
    state_bytes: float  # masters and moments
    reduced_bytes: float  # that tensor parallelism sums over the ranks in forward, and as many in backward
    saved_bytes: float
    output_bytes: float  # that the next layer gets, and whose gradient comes back


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first`` to before ``last`` on ``ranks`` ranks."""

    first: int
    last: int
    ranks: int
    mode: Mode = Mode.DATA


@dataclass(frozen=True)
class Chain:
    """Layers on the ranks of a cluster, with ``micro_batches`` per step and ``budget`` bytes on each rank."""

    layers: tuple[Layer, ...]
    cluster: Cluster
    micro_batches: int
    budget: float = inf

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        names = ("forward", "backward", "weight_bytes", "state_bytes", "reduced_bytes", "saved_bytes")
        return {name: list(accumulate((getattr(x, name) for x in self.layers), initial=0.0)) for name in names}

    def _sum(self, name: str, stage: Stage) -> float:
        sums = self._sums[name]
        return sums[stage.last] - sums[stage.first]

    def seconds(self, stage: Stage) -> float:
        """Of one micro-batch in a stage, forward and backward, exchanges included."""
        alone = (self._sum("forward", stage) + self._sum("backward", stage)) / stage.ranks
        if stage.mode is not Mode.TENSOR:
            return alone
        return alone + 2 * self.cluster.all_reduce_seconds(self._sum("reduced_bytes", stage), stage.ranks)

    def sync(self, stage: Stage) -> float:
        """Seconds of summing gradients that the backward of the last micro-batch does not hide."""
        if stage.mode is Mode.TENSOR or stage.ranks == 1:
            return 0.0
        hidden = self._sum("backward", stage) / stage.ranks
        return max(0.0, self.cluster.all_reduce_seconds(self._sum("weight_bytes", stage), stage.ranks) - hidden)

    def boundary(self, last: int) -> float:
        """Seconds of one micro-batch between layer ``last - 1`` and the next: outputs, and their gradients back."""
        wire = self.cluster.across or self.cluster.inside
        return 2 * (wire.latency_s + self.layers[last - 1].output_bytes / wire.bytes_per_s)

    def memory(self, stage: Stage, to_come: int) -> float:
        """Bytes on a rank of ``stage`` where so many stages follow."""
        whole = 1 if stage.mode is Mode.DATA else stage.ranks
        weights = 2 * self._sum("weight_bytes", stage) / (stage.ranks if stage.mode is Mode.TENSOR else 1)
        saved = self._sum("saved_bytes", stage) / stage.ranks * min(self.micro_batches, to_come + 1)
        return weights + self._sum("state_bytes", stage) / whole + saved

    def stages(self) -> Iterator[Stage]:
        """Every stage that there can be."""
        count = len(self.layers)
        for first in range(count):
            for last in range(first + 1, count + 1):
                for ranks in range(1, self.cluster.ranks + 1):
                    for mode in Mode if ranks > 1 else (Mode.DATA,):
                        yield Stage(first, last, ranks, mode)

    def total(self, plan: Sequence[Stage]) -> float:
        """Seconds of a step; infinite if a rank has too little memory."""
        count = len(plan)
        if any(self.memory(stage, count - 1 - index) > self.budget for index, stage in enumerate(plan)):
            return inf
        times = [self.seconds(stage) for stage in plan]
        times += [self.boundary(stage.last) for stage in plan[:-1]]
        return sum(times) + (self.micro_batches - 1) * max(times) + max(self.sync(stage) for stage in plan)

    def bottleneck(self, plan: Sequence[Stage]) -> float:
        """What P1 minimises: seconds per micro-batch in a pipeline that never drains."""
        work = [self.seconds(stage) + self.sync(stage) / self.micro_batches for stage in plan]
        return max([*work, *(self.boundary(stage.last) for stage in plan[:-1])])


Plan = tuple[Stage, ...]


def least_total(chain: Chain) -> tuple[float, Plan]:
    """The least T and its stages, exactly; infinite and none if nothing fits."""
    options = [_option(chain, stage) for stage in chain.stages()]
    slowest = sorted({bound for option in options for bound in (option.seconds, option.after)})
    best: tuple[float, Plan] = (inf, ())
    least, plan = _least_sum(chain, options)
    for exposed in sorted({option.sync for option in options}) if plan else ():
        for bound in slowest:
            if least + (chain.micro_batches - 1) * bound + exposed >= best[0]:
                break
            allowed = [x for x in options if max(x.seconds, x.after) <= bound and x.sync <= exposed]
            plan = _least_sum(chain, allowed)[1]
            if plan:
                best = min(best, (chain.total(plan), plan), key=lambda found: found[0])
    return best


@dataclass(frozen=True, slots=True)
class _Option:
    """A stage, its seconds, those of the boundary ``after`` it, its exposed sync, and how many stages may follow."""

    stage: Stage
    seconds: float
    after: float
    sync: float
    most_to_come: int


def _option(chain: Chain, stage: Stage) -> _Option:
    after = chain.boundary(stage.last) if stage.last < len(chain.layers) else 0.0
    fitting = [to_come for to_come in range(len(chain.layers)) if chain.memory(stage, to_come) <= chain.budget]
    return _Option(stage, chain.seconds(stage), after, chain.sync(stage), max(fitting, default=-1))


def _least_sum(chain: Chain, options: Sequence[_Option]) -> tuple[float, Plan]:
    """The stages of ``options`` with the least sum of seconds and boundaries; infinite and none if nothing fits."""
    count, ranks = len(chain.layers), chain.cluster.ranks
    # By layer and ranks left: the least sum from there on, and its stages. One more stage each time.
    rest: dict[tuple[int, int], tuple[float, Plan]] = {(count, left): (0.0, ()) for left in range(ranks + 1)}
    best: tuple[float, Plan] = (inf, ())
    for to_come in range(min(count, ranks)):
        found: dict[tuple[int, int], tuple[float, Plan]] = {}
        for option in options:
            if option.most_to_come < to_come:
                continue
            stage, own = option.stage, option.seconds + option.after
            for left in range(stage.ranks, ranks + 1):
                seconds, plan = rest.get((stage.last, left - stage.ranks), (inf, ()))
                here = own + seconds
                if here < found.get((stage.first, left), (inf,))[0]:
                    found[stage.first, left] = here, (stage, *plan)
        rest = found
        best = min(best, rest.get((0, ranks), best), key=lambda each: each[0])
    return best


def least_bottleneck(chain: Chain) -> tuple[float, Plan]:
    """P1: the least bottleneck and its stages, whatever memory there is."""
    count, ranks = len(chain.layers), chain.cluster.ranks
    best: list[list[tuple[float, Plan]]] = [[(0.0, ())] * (ranks + 1)]
    for last in range(1, count + 1):
        row: list[tuple[float, Plan]] = [(inf, ())]
        for left in range(1, ranks + 1):
            found = row[-1]  # a rank may be idle
            for first in range(last):
                for own in range(1, left + 1):
                    before, plan = best[first][left - own]
                    reached = max(before, chain.boundary(first) if first else 0.0)
                    for mode in Mode if own > 1 else (Mode.DATA,):
                        stage = Stage(first, last, own, mode)
                        here = max(reached, chain.seconds(stage) + chain.sync(stage) / chain.micro_batches)
                        if here < found[0]:
                            found = here, (*plan, stage)
            row.append(found)
        best.append(row)
    return best[count][ranks]
