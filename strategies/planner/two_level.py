"""What exchanges in phases inside and across machines take, in how many slices they take the least. Numbers only.

M machines of g ranks each exchange W bytes. A rank sends inside its machine (g-1)/g W to add them up and as much to
gather them, and to other machines (M-1)/M W/g each time. A slice is in one phase while others are in the others, but
one at a time inside and one across, in the order of ``strategies/engine/ranks/two_level.py``, whose host waits for a
phase before it issues the next one of that slice.

As for other exchanges (``exchanges.py``) one network card per rank is assumed, and rings over all cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from deepstow.strategies.core.facts import Facts
from deepstow.strategies.planner.cluster import Cluster, Wire

SLICES = (1, 2, 4, 8)  # that are tried
UNKNOWN = 2  # slices where rates are unknown: the least with which anything overlaps
Road: TypeAlias = Literal["inside", "across"]
SUMS: tuple[Road, ...] = ("inside", "across")
GATHERS: tuple[Road, ...] = ("across", "inside")


def phases(on: Cluster, num_bytes: float, slices: int, roads: Sequence[Road] = SUMS + GATHERS) -> float:
    """Seconds of ``roads``, one phase after the other for each slice; by default of an all-reduce."""
    assert on.across is not None
    here, count = on.per_machine, on.ranks // on.per_machine
    sent = {"inside": (here - 1) / here * num_bytes, "across": (count - 1) / count * num_bytes / here}
    wires = {"inside": on.inside, "across": on.across}
    piece = {road: sent[road] / slices / wire.bytes_per_s + wire.latency_s for road, wire in wires.items()}
    free = {"inside": 0.0, "across": 0.0}
    arrived, host = [0.0] * slices, 0.0
    for tick in range(slices + len(roads)):
        for number, road in enumerate(roads):
            if 0 <= (part := tick - number) < slices:
                host = max(host, arrived[part])
                arrived[part] = free[road] = max(free[road], host) + piece[road]
    return max(arrived)


def best(on: Cluster, num_bytes: float) -> int:
    """How many slices take the least."""
    return min(SLICES, key=lambda slices: (phases(on, num_bytes, slices), slices))


def machines_of(facts: Facts) -> Cluster | None:
    """Those of a run, if all its ranks are on machines with as many of them, and their rates are known."""
    ranks = facts.run.copies
    here = facts.machine.ranks or facts.run.copies
    rates = facts.machine.rates
    if here >= ranks or ranks % here or rates is None or not rates.net_across_bytes_per_s:
        return None
    inside = Wire(rates.exchange_bytes_per_s(), rates.net_latency_s)
    return Cluster(ranks, here, inside, Wire(rates.net_across_bytes_per_s, rates.net_across_latency_s))
