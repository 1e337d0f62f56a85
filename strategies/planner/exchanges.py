"""How fast ranks that share buckets exchange, on one machine and over several, and by which road. Numbers only.

N ranks, R of them on each machine, exchange W bytes: a weight of which each rank has a span, or a gradient of which
each has all and wants the sum of its span. Each rank sends (N-1)/N W. What leaves its machine depends on the way:

    ring       gathers, and sums that are made on the way (``reduction: fast``). One rank of a machine sends to another
               machine; libraries lay as many rings as a machine has network cards. One card per rank is assumed, and
               each sends (N-1)/N W/R
    straight   gradients to their owners, who add them (``reduction: exact``). A rank sends each other rank its span,
               so what leaves its machine is (N-R)/N W
    two-level  inside machines and across in turn (``two_level.py``): a sum and a gather send (M-1)/M W/R across each

What a rank sends counts at the rate inside, what leaves at the rate between machines, and the slower of the two is the
time. That is arithmetic; no network was measured. Where the rate between machines is unknown, all ranks count as if
they were on one machine.

Ranks that have slices of rows send 3 messages before attention and one after it, in forward and as many back
(``strategies/sequence.py``); the heads of keys and values count as those of queries. Attention waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepstow.strategies.core.facts import Facts, Rates, RunFacts
from deepstow.strategies.core.layout import Reduction
from deepstow.strategies.planner.cluster import Cluster, Wire
from deepstow.strategies.planner.pipeline_bytes import MESSAGE_BYTES, boundary_bytes
from deepstow.strategies.planner.two_level import GATHERS, SUMS, machines_of, phases

SLICE_MESSAGES = 4  # of a block between ranks with slices of a row: queries, keys, values, and the result
EPS: Mapping[str, float] = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


def gather_rate(facts: Facts, rates: Rates) -> float:
    """Bytes per second that a rank sends in a ring, or as if it did where exchanges are two-level."""
    if (machines := _two_level(facts)) is not None:
        return _sent(facts) / phases(machines, MESSAGE_BYTES, facts.run.two_level, GATHERS)
    (_, here), inside, across = spread(facts), rates.exchange_bytes_per_s(), rates.net_across_bytes_per_s
    return min(inside, here * across) if across and crosses(facts) else inside


def sums_slowdown(facts: Facts, rates: Rates, reduction: Reduction) -> float:
    """How many times as long a gradient takes to its owners as a gather of as many bytes."""
    if (machines := _two_level(facts)) is not None:
        return gather_rate(facts, rates) * phases(machines, MESSAGE_BYTES, facts.run.two_level, SUMS) / _sent(facts)
    (ranks, here), across = spread(facts), rates.net_across_bytes_per_s
    if reduction == "fast" or not across or not crosses(facts):
        return 1.0
    return gather_rate(facts, rates) / min(rates.exchange_bytes_per_s(), across * (ranks - 1) / (ranks - here))


def sum_bound(ranks: int, dtype: str) -> float:
    """How far a fast sum may be from the exact one, in parts of the sizes of its summands, added up. Each of the two
    orders of N numbers rounds N - 1 times, by half of the dtype's eps; a single addition rounds alike in either order.
    """
    return (ranks - 1) * EPS[dtype] if ranks > 2 else 0.0


def leaving(facts: Facts, reduction: Reduction) -> float:
    """The part of a gradient that a rank sends to other machines."""
    ranks, here = spread(facts)
    if not crosses(facts):
        return 0.0
    if facts.run.two_level:
        return (ranks - here) / ranks / here
    return (ranks - here) / ranks if reduction == "exact" else (ranks - 1) / ranks / here


def _two_level(facts: Facts) -> Cluster | None:
    return machines_of(facts) if facts.run.two_level else None


def _sent(facts: Facts) -> float:
    ranks, _ = spread(facts)
    return (ranks - 1) / ranks * MESSAGE_BYTES


def crosses(facts: Facts) -> bool:
    """Whether the ranks that share buckets are on several machines."""
    ranks, here = spread(facts)
    return here < ranks


def slices_seconds(facts: Facts, rates: Rates) -> float:
    """What the ranks of a row exchange in one pass of a block, of one micro-batch."""
    ranks, wire = facts.run.slices, straight(facts, rates, facts.run.slices)
    return SLICE_MESSAGES * (ranks - 1) * (boundary_bytes(facts.run) / ranks**2 / wire.bytes_per_s + wire.latency_s)


def straight(facts: Facts, rates: Rates, ranks: int) -> Wire:
    """What neighbouring ``ranks`` send each other by, which may be on several machines."""
    inside, across = rates.exchange_bytes_per_s(), rates.net_across_bytes_per_s
    if across is None or ranks <= (facts.machine.ranks or ranks):
        return Wire(inside, rates.net_latency_s)
    return Wire(min(inside, across), rates.net_across_latency_s)


def slices_bytes(run: RunFacts) -> int:
    """Of a micro-batch's queries, keys and values that come from the other slices."""
    tokens = -(-run.micro_batch * run.sequence // run.slices)
    return 3 * tokens * run.hidden_size * run.precision.element_bytes


def sum_seconds(facts: Facts, rates: Rates) -> float:
    """One sum of a micro-batch's hidden states over the tensor ranks of a copy."""
    run = facts.run
    return cluster_of(facts, rates).all_reduce_seconds(boundary_bytes(run), run.tensor)


def cluster_of(facts: Facts, rates: Rates) -> Cluster:
    """The ranks of the run and their network."""
    rate, here = rates.net_across_bytes_per_s, facts.machine.ranks or facts.run.world_size
    inside = Wire(rates.exchange_bytes_per_s(), rates.net_latency_s)
    across = None if rate is None else Wire(rate, rates.net_across_latency_s)
    return Cluster(facts.run.world_size, here, inside, across)


def spread(facts: Facts) -> tuple[int, int]:
    """How many ranks share a bucket, and how many of them are on one machine; they are neighbours."""
    ranks = facts.run.copies
    return ranks, min(ranks, facts.machine.ranks or ranks)


def from_host(rates: Rates, shards: int) -> bool:
    """Whether weights that rest on a common host come sooner, or as soon, if each of ``shards`` ranks copies all parts
    up instead of its own; ``rates`` are one rank's.

    Weights follow each other, so what counts is the road that is busy for the longest time per byte of weight. An
    exchange by way of the host uses its link in both directions, and writes and reads the host's memory.
    """
    others = (shards - 1) / shards
    crossing = 0.0 if rates.net_bytes_per_s else others
    link_s = (1 - others + crossing) / rates.up_bytes_per_s
    dram_s = (1 - others + 2 * crossing) / rates.dram_bytes_per_s
    network_s = max(link_s, dram_s, others / rates.exchange_bytes_per_s())
    return max(1 / rates.up_bytes_per_s, 1 / rates.dram_bytes_per_s) <= network_s
