"""How fast ranks that share buckets exchange, on one machine and over several. Numbers only.

N ranks, R of them on each machine, exchange W bytes: a weight of which each rank has a span, or a gradient of which each
has all and wants the sum of its span. Each rank sends (N-1)/N W. How much of that leaves its machine depends on the way:

    ring       gathers, and sums that are made on the way (``reduction: fast``). A rank sends to its neighbour only, so
               one rank of a machine sends to another machine. Libraries lay as many rings as a machine has network
               cards; one card per rank is assumed, and each sends (N-1)/N W/R
    straight   gradients to their owners, who add them (``reduction: exact``). A rank sends each other rank its span,
               so what leaves its machine is (N-R)/N W

With 2 machines of 8 ranks that is 0.12 W and 0.5 W. On one machine both ways take equally long. Links inside a machine
and the network are busy at the same time, and the slower of them counts.

Where the rate between machines is unknown, all ranks count as if they were on one machine.
"""

from __future__ import annotations

from math import inf

from strategies.core.facts import Facts, Rates
from strategies.core.layout import Reduction


def gather_rate(facts: Facts, rates: Rates) -> float:
    """Bytes per second that a rank sends in a ring."""
    (_, here), inside, across = spread(facts), rates.exchange_bytes_per_s(), rates.net_across_bytes_per_s
    return min(inside, here * across) if across and crosses(facts) else inside


def sums_slowdown(facts: Facts, rates: Rates, reduction: Reduction) -> float:
    """How many times as long a gradient takes to its owners as a gather of as many bytes."""
    (ranks, here), across = spread(facts), rates.net_across_bytes_per_s
    if reduction == "fast" or not across or not crosses(facts):
        return 1.0
    inside = rates.exchange_bytes_per_s() * (ranks - 1) / (here - 1) if here > 1 else inf
    return gather_rate(facts, rates) / min(inside, across * (ranks - 1) / (ranks - here))


def leaving(facts: Facts, reduction: Reduction) -> float:
    """The part of a gradient that a rank sends to other machines."""
    ranks, here = spread(facts)
    if not crosses(facts):
        return 0.0
    return (ranks - here) / ranks if reduction == "exact" else (ranks - 1) / ranks / here


def crosses(facts: Facts) -> bool:
    """Whether the ranks that share buckets are on several machines."""
    ranks, here = spread(facts)
    return here < ranks


def spread(facts: Facts) -> tuple[int, int]:
    """How many ranks share a bucket, and how many of them are on one machine; they are neighbours."""
    ranks = facts.run.replicas
    return ranks, min(ranks, facts.machine.ranks or ranks)
