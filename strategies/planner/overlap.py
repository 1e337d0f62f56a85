"""In how many parts rows are taken, so that what ranks exchange waits least for compute. Numbers only.

Compute and the network are two machines that do one thing at a time. Where the rates of the machine are unknown there
are two parts, the least with which anything overlaps.

A layer of experts sends rows to their experts and results back, slice by slice. Products of one slice run while others
travel; everything that travels takes the same network, in the order of ``strategies/parallel/expert_exchange.py``. Rows
are assumed to be spread evenly over experts: what one rank has too many, all wait for.

Sub-layers of tensor ranks follow each other, in each the chunks in order. A chunk is computed when the one before it
is, and when its rows of the sub-layer before are summed; its sum begins before what is computed after it (in backward
gradients of weights). A pass back goes the other way. All sub-layers take the same number: the smallest that is within
2 % of the fastest, since what is known of chunks is no better than that. Numbers of their own gained less in 300 of 300
random runs of 24 blocks.

``Passes.of`` has the tables of a run: blocks of so many rows as ``deepstow plan --measure`` has timed them, else
operations over rates, where a chunk takes at least as long as its kernels' launches; sums as in ``network.py``, by the
rates of ``deepstow doctor --rates``. Attention has a third of a block and gradients of weights behind sums a third of
backward (assumed: with the widths of a Llama).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from deepstow.strategies.core.facts import Facts, Param, RunFacts, UnitKind
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.engine_bytes import boundary_bytes
from deepstow.strategies.planner.network import UNKNOWN, Timeline, cluster_of, straight
from deepstow.strategies.planner.step_cost import unit_seconds

MOST = 8  # parts that are tried
ATTENTION = 1 / 3  # of a block's compute
LATER = 1 / 3  # of backward: gradients of weights divided by columns
KERNELS = 15  # that a sub-layer launches in forward
UNDER_WAY = "tensor: rows under way"  # the buffer of a plan that has chunks
ENOUGH = 1.02  # times the fastest
# By the number of chunks, seconds of one: of compute before its sum begins, of the sum, and of compute after it began.
Table = Mapping[int, tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of one layer's forward, of one micro-batch."""

    slices: int
    num_bytes: int  # of a rank's rows
    sent_bytes: int  # of them to other ranks
    products: float | None = None  # seconds of all of them; None: rates are unknown
    wire: float = 0.0  # seconds of sending all rows one way
    wait: float = 0.0  # that each exchange takes besides

    @property
    def alone(self) -> float:
        """Seconds of the exchanges of a pass."""
        return 2 * (self.wire + self.wait * self.slices)

    def exposed(self, times: float) -> float:
        """Seconds of them that products which take ``times`` those of forward do not hide."""
        products = times * (self.products or 0.0)
        return layer_seconds(products, self.wire, self.wait, self.slices) - products

    @property
    def words(self) -> str:
        many = f"{self.slices} slice{'s' * (self.slices > 1)}"
        text = f"rows to experts and back in {many}: {human(self.sent_bytes)} sent each way per layer and micro-batch"
        if self.products is None:
            return text
        seconds, hidden = self.products + self.exposed(1), 1 - self.exposed(1) / self.alone
        return f"{text}, {seconds * 1e3:.3g} ms with the products (simulated), {hidden:.0%} of it hidden"


def rows_bytes(run: RunFacts) -> int:
    """Of a micro-batch's rows, each as often as it has experts."""
    rows = run.micro_batch * run.sequence * run.experts_per_token
    return rows * run.hidden_size * run.precision.element_bytes


def exchanges_of(facts: Facts, experts: Sequence[Param], degree: int, slices: int | None) -> Exchanges:
    """What it takes in ``slices``, or in the number that takes the least; ``experts``: weights that a rank has."""
    run, rates = facts.run, facts.machine.rates
    rows = run.micro_batch * run.sequence * run.experts_per_token
    num_bytes = rows_bytes(run)
    sent = num_bytes * (degree - 1) // degree
    local = max(1, run.num_experts // degree)
    if rates is None or not experts:
        return Exchanges(slices or min(UNKNOWN, local), num_bytes, sent)
    layers = len({param.unit for param in experts})
    flops = 2 * rows * sum(param.num_elements for param in experts) / layers / local
    products = flops / rates.gemm_flops(run.precision)
    road = straight(facts, rates, degree)
    wire, wait = sent / road.bytes_per_s, road.latency_s * (degree - 1)
    seconds_of = {count: layer_seconds(products, wire, wait, count) for count in range(1, min(MOST, local) + 1)}
    chosen = slices or min(seconds_of, key=lambda count: (seconds_of[count], count))
    return Exchanges(chosen, num_bytes, sent, products, wire, wait)


def layer_seconds(products: float, wire: float, wait: float, slices: int) -> float:
    """Seconds of a layer: of all ``products``, of sending all rows one way, and what each exchange waits besides."""
    piece, timeline = wire / slices + wait, Timeline()
    arrived = timeline.add("network", piece)
    for number in range(slices):
        following = timeline.add("network", piece) if number + 1 < slices else 0.0
        computed = timeline.add("compute", products / slices, arrived)
        timeline.add("network", piece, computed)
        arrived = following
    return timeline.free["network"]


# --- chunks ----------------------------------------------------------------------------------------------------------


def divisors(rows: int, most: int = MOST) -> tuple[int, ...]:
    """The numbers up to ``most`` that divide ``rows``, ascending."""
    return tuple(number for number in range(1, min(rows, most) + 1) if rows % number == 0)


def chunk_seconds(tables: Iterable[Table], chunks: int) -> float:
    """When all has ended."""
    timeline, summed = Timeline(), [0.0] * chunks
    for compute, exchange, compute_after in (table[chunks] for table in tables):
        for chunk in range(chunks):
            computed = timeline.add("compute", compute, summed[chunk])
            summed[chunk] = timeline.add("network", exchange, computed)
            timeline.add("compute", compute_after)
    return max(timeline.free.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Passes:
    """Tables of both passes, in the order of the sub-layers: attention and MLP of each block in turn."""

    forward: Sequence[Table]
    backward: Sequence[Table]

    def seconds(self) -> dict[int, float]:
        """Of both, by the number of chunks."""
        backward = self.backward[::-1]
        return {many: chunk_seconds(self.forward, many) + chunk_seconds(backward, many) for many in self.forward[0]}

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
        sums = {n: cluster.all_reduce_seconds(boundary_bytes(run) / n, run.tensor) for n in numbers}
        timed = facts.unit_times.chunks if facts.unit_times is not None else {}
        for unit, times in zip(facts.units, unit_seconds(facts, rates), strict=True):
            for share in (ATTENTION, 1 - ATTENTION) if unit.kind is UnitKind.BLOCK else ():
                for back, (tables, later) in enumerate(zip(passes, (0.0, LATER), strict=True)):
                    least = (1 + back) * KERNELS * launched
                    compute = {
                        n: timed[n][back] * share if n in timed else max(times[back] * share / n, least)
                        for n in numbers
                    }
                    tables.append({n: ((1 - later) * compute[n], sums[n], later * compute[n]) for n in numbers})
        return cls(*passes)
