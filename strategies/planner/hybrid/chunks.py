"""In how many chunks each sub-layer takes its rows, so that sums over ranks wait least for compute. Numbers only.

Compute and sums are two machines that do one thing at a time. With p chunks a sub-layer's table says how long one of
them is computed and how long it is summed; sub-layers follow each other, in each the chunks in order. A chunk is
computed when the one before it is, and when the sums are there of all chunks of the sub-layer before that have rows of
it:

    C[l, i] = max(D before, R[l - 1, last chunk with rows of i]) + compute of l
    R[l, i] = max(R before, C[l, i]) + sum of l
    D[l, i] = C[l, i] + what l computes after it has begun the sum: in backward gradients of weights

``fastest`` finds the p of each sub-layer with which all ends first. Its labels are the times at which compute and
each sum of a sub-layer end; of two labels with the same p the one that ends later in all of them can be dropped. Few
are left, however many sub-layers there are, so the search is linear in their number.

A pass back has its own times, and goes through the sub-layers the other way with the chunks of the pass forward.
``Passes.choose`` takes the fastest of both together among each p for all, what is fastest forward, and what is fastest
back. One p for all, the smallest, is taken where it is within 2 %: what is known of chunks is no better than that.

``Passes.of`` has the tables of a run: blocks of so many rows as ``launch/plan.py --measure`` has timed them, else
operations over rates, where a chunk takes at least as long as its kernels' launches; sums as in ``cluster.py``, by the
rates of ``launch/doctor.py --rates``. Attention has a third of a block and gradients of weights behind sums a third of
backward (assumed: with the widths of a Llama).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from strategies.core.facts import Facts, UnitKind
from strategies.planner.exchanges import cluster_of
from strategies.planner.pipeline_bytes import boundary_bytes
from strategies.planner.step_cost import unit_seconds

ATTENTION = 1 / 3  # of a block's compute
LATER = 1 / 3  # of backward: gradients of weights divided by columns
KERNELS = 15  # that a sub-layer launches in forward
UNDER_WAY = "tensor: rows under way"  # the buffer of a plan that has chunks
UNKNOWN = 2  # chunks where rates are unknown: the least with which anything overlaps
ENOUGH = 1.02  # times the fastest, for one number of all sub-layers
# By the number of chunks, seconds of one: of compute before its sum begins, of the sum, and of compute after it began.
Table = Mapping[int, tuple[float, float, float]]


def named(chunks: Sequence[int]) -> str:
    """2, or 1 to 4"""
    least, most = min(chunks), max(chunks)
    return str(least) if least == most else f"{least} to {most}"


def divisors(rows: int, most: int = 8) -> tuple[int, ...]:
    """The numbers of chunks, up to ``most``, that divide ``rows``."""
    return tuple(each for each in range(1, min(rows, most) + 1) if rows % each == 0)


@dataclass(frozen=True, slots=True)
class _Label:
    """A way through the first sub-layers: when compute ends, and each sum of the last one."""

    computed: float
    summed: tuple[float, ...]
    chosen: tuple[int, _Label | None] | None = None

    def extended(self, chunks: int, compute: float, exchange: float, after: float) -> _Label:
        before, computed, summed = len(self.summed), self.computed, self.summed[-1]
        found = []
        for chunk in range(chunks):
            last = -(-(chunk + 1) * before // chunks) - 1  # that has rows of it
            computed = max(computed, self.summed[last]) + compute
            summed = max(summed, computed) + exchange
            computed += after
            found.append(summed)
        return _Label(computed, tuple(found), (chunks, self))

    @property
    def end(self) -> float:
        return max(self.computed, self.summed[-1])

    def is_beaten_by(self, other: _Label) -> bool:
        return other.computed <= self.computed and all(
            one <= two for one, two in zip(other.summed, self.summed, strict=True)
        )

    def way(self) -> tuple[int, ...]:
        found, label = [], self
        while label.chosen is not None:
            chunks, before = label.chosen
            assert before is not None
            found.append(chunks)
            label = before
        return tuple(reversed(found))


START = _Label(0.0, (0.0,))


def seconds(tables: Iterable[Table], chunks: Iterable[int]) -> float:
    """When all has ended."""
    label = START
    for table, many in zip(tables, chunks, strict=True):
        label = label.extended(many, *table[many])
    return label.end


def fastest(tables: Iterable[Table]) -> tuple[int, ...]:
    """The chunks of each sub-layer with which all ends first."""
    labels = [START]
    for table in tables:
        found: list[_Label] = []
        for chunks, seconds_of_one in table.items():
            kept: list[_Label] = []
            for label in (label.extended(chunks, *seconds_of_one) for label in labels):
                if not any(label.is_beaten_by(other) for other in kept):
                    kept = [other for other in kept if not other.is_beaten_by(label)] + [label]
            found += kept
        labels = found
    return min(labels, key=lambda label: label.end).way()


@dataclass(frozen=True, slots=True)
class Passes:
    """Tables of both passes, in the order of the sub-layers: attention and MLP of each block in turn."""

    forward: Sequence[Table]
    backward: Sequence[Table]

    def seconds(self, chunks: Sequence[int]) -> float:
        return seconds(self.forward, chunks) + seconds(reversed(self.backward), reversed(chunks))

    def alike(self) -> list[tuple[int, ...]]:
        """One number for all."""
        return [(each,) * len(self.forward) for each in self.forward[0]]

    def choose(self) -> tuple[int, ...]:
        """The chunks of each sub-layer: the smallest number for all that is nearly the fastest, else the fastest."""
        ways = [*self.alike(), fastest(self.forward), tuple(reversed(fastest(reversed(self.backward))))]
        times = {each: self.seconds(each) for each in ways}
        least = min(times.values())
        return next((each for each in self.alike() if times[each] <= ENOUGH * least), min(ways, key=times.__getitem__))

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
