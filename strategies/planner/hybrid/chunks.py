"""In how many chunks sub-layers take their rows, so that sums over ranks wait least for compute. Numbers only.

Compute and sums are two machines that do one thing at a time. Sub-layers follow each other, in each the chunks in
order. A chunk is computed when the one before it is, and when its rows of the sub-layer before are summed; its sum
begins before what is computed after it (in backward gradients of weights). A pass back goes the other way.

All sub-layers take the same number: the smallest that is within 2 % of the fastest, since what is known of chunks is no
better than that. Numbers of their own gained less in 300 of 300 random runs of 24 blocks.

``Passes.of`` has the tables of a run: blocks of so many rows as ``deepstow plan --measure`` has timed them, else
operations over rates, where a chunk takes at least as long as its kernels' launches; sums as in ``cluster.py``, by the
rates of ``deepstow doctor --rates``. Attention has a third of a block and gradients of weights behind sums a third of
backward (assumed: with the widths of a Llama).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from deepstow.strategies.core.facts import Facts, UnitKind
from deepstow.strategies.planner.exchanges import cluster_of
from deepstow.strategies.planner.pipeline_bytes import boundary_bytes
from deepstow.strategies.planner.step_cost import unit_seconds

ATTENTION = 1 / 3  # of a block's compute
LATER = 1 / 3  # of backward: gradients of weights divided by columns
KERNELS = 15  # that a sub-layer launches in forward
UNDER_WAY = "tensor: rows under way"  # the buffer of a plan that has chunks
UNKNOWN = 2  # chunks where rates are unknown: the least with which anything overlaps
ENOUGH = 1.02  # times the fastest
# By the number of chunks, seconds of one: of compute before its sum begins, of the sum, and of compute after it began.
Table = Mapping[int, tuple[float, float, float]]


def divisors(rows: int, most: int = 8) -> tuple[int, ...]:
    """The numbers of chunks, up to ``most``, that divide ``rows``."""
    return tuple(each for each in range(1, min(rows, most) + 1) if rows % each == 0)


def seconds(tables: Iterable[Table], chunks: int) -> float:
    """When all has ended."""
    computed, summed = 0.0, [0.0] * chunks
    for compute, exchange, after in (table[chunks] for table in tables):
        end = summed[-1]
        for chunk in range(chunks):
            computed = max(computed, summed[chunk]) + compute
            summed[chunk] = end = max(end, computed) + exchange
            computed += after
    return max(computed, summed[-1])


@dataclass(frozen=True, slots=True)
class Passes:
    """Tables of both passes, in the order of the sub-layers: attention and MLP of each block in turn."""

    forward: Sequence[Table]
    backward: Sequence[Table]

    def seconds(self) -> dict[int, float]:
        """Of both, by the number of chunks."""
        back = self.backward[::-1]
        return {many: seconds(self.forward, many) + seconds(back, many) for many in self.forward[0]}

    def choose(self) -> int:
        """The smallest number that is nearly the fastest."""
        times = self.seconds()
        return min(many for many, time in times.items() if time <= ENOUGH * min(times.values()))

    @classmethod
    def of(cls, facts: Facts, more: Iterable[int] = ()) -> Self | None:
        """Of a micro-batch, in numbers of chunks that divide it, and in ``more``; None: nothing is known of speed."""
        run, rates = facts.run, facts.machine.rates
        if rates is None or not run.forward_flops:
            return None
        cluster = cluster_of(facts, rates)
        launched = rates.launch_s if run.accelerated else 0.0
        passes: tuple[list[Table], list[Table]] = ([], [])
        numbers = sorted({*divisors(run.micro_batch), *more})
        sums = {each: cluster.all_reduce_seconds(boundary_bytes(run) / each, run.tensor) for each in numbers}
        timed = facts.unit_times.chunks if facts.unit_times is not None else {}
        for unit, both in zip(facts.units, unit_seconds(facts, rates), strict=True):
            for share in (ATTENTION, 1 - ATTENTION) if unit.kind is UnitKind.BLOCK else ():
                for back, (tables, later) in enumerate(zip(passes, (0.0, LATER), strict=True)):
                    least = (1 + back) * KERNELS * launched
                    one = {
                        each: timed[each][back] * share if each in timed else max(both[back] * share / each, least)
                        for each in numbers
                    }
                    tables.append({each: ((1 - later) * one[each], sums[each], later * one[each]) for each in numbers})
        return cls(*passes)
