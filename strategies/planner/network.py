"""Ranks on machines and what their exchanges take: a latency per hop and a rate, inside a machine and across.

A group is ``size`` ranks, each ``stride`` after the one before: 1 in tensor groups, the tensor degree in data groups;
stages are next to each other. So what talks most is nearest, as in Megatron-LM and torch's device meshes. With ``here``
of its n ranks on a machine, and rates per rank and direction, S bytes take

    gather, scatter     (n - 1) latency + (n - 1)/n S / min(rate inside, here x rate across)
    sum                 2 log2 n latency + 2 (n - 1)/n S / the same

A gather or a reduce-scatter goes around a ring; libraries lay as many rings as a machine has network cards, and one
card per rank is assumed. So do sums that are made on the way (``reduction: fast``). A sum that all ranks need goes
along trees. Two other ways:

    straight   gradients to their owners, who add them (``reduction: exact``). A rank sends each other rank its span,
               so what leaves its machine is (n - here)/n S
    two-level  inside machines and across in turn, in slices. On M machines a sum and a gather each send (here - 1)/here
               S inside and (M - 1)/M S/here across. A slice is in one phase while others are in the others, but one at
               a time inside and one across, in the order of ``strategies/engine/ranks/two_level.py``, whose host waits
               for a phase before it issues the next one of that slice

What a rank sends counts at the rate inside, what leaves at the rate between machines, and the slower of the two is the
time. That is arithmetic; no network was measured. Where the rate between machines is unknown, all ranks count as if
they were on one machine. Of networks across machines the latency per hop is 17 us, from 4.2 to 33, and compute hides
nothing of what ZeRO 2 and 3 exchange at every micro-batch, or all of it, or a part between: docs/parallelism.md says
from which publications.

Ranks that have slices of rows send 3 messages before attention and one after it, in forward and as many back
(``strategies/sequence.py``); the heads of keys and values count as those of queries. Attention waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal, TypeAlias

from deepstow.strategies.core.facts import Facts, Rates, RunFacts
from deepstow.strategies.core.layout import Reduction
from deepstow.strategies.planner.engine_bytes import MESSAGE_BYTES, boundary_bytes

HOPEFUL, CAREFUL = 4.2 / 17, 33 / 17  # of the latency across machines
SLICE_MESSAGES = 4  # of a block between ranks with slices of a row: queries, keys, values, and the result
EPS: Mapping[str, float] = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
SLICES = (1, 2, 4, 8)  # of a two-level exchange, that are tried
UNKNOWN = 2  # slices where rates are unknown: the least with which anything overlaps
Road: TypeAlias = Literal["inside", "across"]
SUMS: tuple[Road, ...] = ("inside", "across")
GATHERS: tuple[Road, ...] = ("across", "inside")


class Timeline:
    """Who does one thing at a time does each in the order in which it is added, as soon as it can begin."""

    def __init__(self) -> None:
        self.free = defaultdict[Hashable, float](float)  # when each is done with all that was added

    def add(self, who: Hashable, seconds: float, ready: float = 0.0) -> float:
        """When ``who`` has done what takes so many ``seconds`` and cannot begin before ``ready``."""
        end = max(self.free[who], ready) + seconds
        self.free[who] = end
        return end


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of connection: bytes per second of a rank, each way, and seconds per hop."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """``ranks``, of which ``per_machine`` share a machine. Machines are full; ``across``: None if there is one.

    ``hidden``: the part that compute hides of what is exchanged across machines at every micro-batch.
    """

    ranks: int
    per_machine: int
    inside: Wire
    across: Wire | None = None
    hidden: float = 0.0

    @classmethod
    def of(cls, rates: Rates, ranks: int, per_machine: int) -> Cluster:
        """So many ranks, connected as ``rates`` say."""
        rate = rates.net_across_bytes_per_s
        across = Wire(rate, rates.net_across_latency_s) if rate else None
        return cls(ranks, per_machine, Wire(rates.exchange_bytes_per_s(), rates.net_latency_s), across)

    def either_way(self) -> tuple[Cluster, ...]:
        """The same at the hopeful and at the careful end of what is known; empty if nothing goes across machines."""
        if self.across is None or self.ranks <= self.per_machine:
            return ()
        wires = [replace(self.across, latency_s=share * self.across.latency_s) for share in (HOPEFUL, CAREFUL)]
        return replace(self, across=wires[0], hidden=1.0), replace(self, across=wires[1], hidden=0.0)

    def exposed(self, size: int, stride: int) -> float:
        """For which part compute waits of what such a group exchanges at every micro-batch."""
        return (1.0 - self.hidden) * (self._machines(size, stride)[1] > 1)

    def gather_seconds(self, num_bytes: float, size: int, stride: int = 1, messages: int = 1) -> float:
        """Gather ``num_bytes`` that ``size`` ranks have in equal parts, or reduce and scatter as many."""
        wire = self.ring(size, stride)
        return messages * (size - 1) * wire.latency_s + (size - 1) / size * num_bytes / wire.bytes_per_s

    def all_reduce_seconds(self, num_bytes: float, size: int, stride: int = 1, messages: float = 1) -> float:
        """Sum ``num_bytes`` of each of ``size`` ranks on all of them."""
        wire = self.ring(size, stride)
        return 2 * (messages * ceil(log2(size)) * wire.latency_s + (size - 1) / size * num_bytes / wire.bytes_per_s)

    def send_seconds(self, num_bytes: float, stage: int, ranks_of_stage: int) -> float:
        """Send ``num_bytes`` from a rank of ``stage`` to the same one of the next stage."""
        first, last = stage * ranks_of_stage, (stage + 2) * ranks_of_stage - 1
        same = first // self.per_machine == last // self.per_machine
        wire = self.inside if same or self.across is None else self.across
        return wire.latency_s + num_bytes / wire.bytes_per_s

    def _machines(self, size: int, stride: int) -> tuple[int, int]:
        """Ranks of a group in one machine, and the machines that it is on."""
        in_machine = max(1, min(size, self.per_machine // stride))
        return in_machine, ceil(size / in_machine) if self.across is not None else 1

    def ring(self, size: int, stride: int = 1) -> Wire:
        """What each rank of a group sends by, where all rings are used."""
        in_machine, machines = self._machines(size, stride)
        if self.across is None or machines == 1:
            return self.inside
        return Wire(min(self.inside.bytes_per_s, in_machine * self.across.bytes_per_s), self.across.latency_s)

    def straight(self, size: int) -> Wire:
        """What neighbouring ranks send each other by, which may be on several machines."""
        if self.across is None or size <= self.per_machine:
            return self.inside
        return Wire(min(self.inside.bytes_per_s, self.across.bytes_per_s), self.across.latency_s)


# --- of a run --------------------------------------------------------------------------------------------------------


def cluster_of(facts: Facts, rates: Rates, ranks: int | None = None) -> Cluster:
    """The first so many ranks of the run, or all of them, and their network."""
    count = facts.run.world_size if ranks is None else ranks
    return Cluster.of(rates, count, facts.machine.ranks or count)


def straight(facts: Facts, rates: Rates, ranks: int) -> Wire:
    """What neighbouring ``ranks`` of the run send each other by."""
    return cluster_of(facts, rates, ranks).straight(ranks)


def spread(facts: Facts) -> tuple[int, int]:
    """How many ranks share a bucket, and how many of them are on one machine; they are neighbours."""
    ranks = facts.run.copies
    return ranks, min(ranks, facts.machine.ranks or ranks)


def crosses(facts: Facts) -> bool:
    """Whether the ranks that share buckets are on several machines."""
    ranks, in_machine = spread(facts)
    return in_machine < ranks


def gather_rate(facts: Facts, rates: Rates) -> float:
    """Bytes per second that a rank sends in a ring, or as if it did where exchanges are two-level."""
    if (machines := _two_level(facts)) is not None:
        return _sent(facts) / phases(machines, MESSAGE_BYTES, facts.run.two_level, GATHERS)
    return cluster_of(facts, rates, facts.run.copies).ring(facts.run.copies).bytes_per_s


def sums_slowdown(facts: Facts, rates: Rates, reduction: Reduction) -> float:
    """How many times as long a gradient takes to its owners as a gather of as many bytes."""
    if (machines := _two_level(facts)) is not None:
        return gather_rate(facts, rates) * phases(machines, MESSAGE_BYTES, facts.run.two_level, SUMS) / _sent(facts)
    (ranks, in_machine), across = spread(facts), rates.net_across_bytes_per_s
    if reduction == "fast" or not across or not crosses(facts):
        return 1.0
    return gather_rate(facts, rates) / min(rates.exchange_bytes_per_s(), across * (ranks - 1) / (ranks - in_machine))


def sum_bound(ranks: int, dtype: str) -> float:
    """How far a fast sum may be from the exact one, in parts of the sizes of its summands, added up. Each of the two
    orders of N numbers rounds N - 1 times, by half of the dtype's eps; a single addition rounds alike in either order.
    """
    return (ranks - 1) * EPS[dtype] if ranks > 2 else 0.0


def leaving(facts: Facts, reduction: Reduction) -> float:
    """The part of a gradient that a rank sends to other machines."""
    ranks, in_machine = spread(facts)
    if not crosses(facts):
        return 0.0
    if facts.run.two_level:
        return (ranks - in_machine) / ranks / in_machine
    return (ranks - in_machine) / ranks if reduction == "exact" else (ranks - 1) / ranks / in_machine


def slices_seconds(facts: Facts, rates: Rates) -> float:
    """What the ranks of a row exchange in one pass of a block, of one micro-batch."""
    ranks, wire = facts.run.slices, straight(facts, rates, facts.run.slices)
    return SLICE_MESSAGES * (ranks - 1) * (boundary_bytes(facts.run) / ranks**2 / wire.bytes_per_s + wire.latency_s)


def slices_bytes(run: RunFacts) -> int:
    """Of a micro-batch's queries, keys and values that come from the other slices."""
    tokens = -(-run.micro_batch * run.sequence // run.slices)
    return 3 * tokens * run.hidden_size * run.precision.element_bytes


def sum_seconds(facts: Facts, rates: Rates) -> float:
    """One sum of a micro-batch's hidden states over the tensor ranks of a copy."""
    run = facts.run
    return cluster_of(facts, rates).all_reduce_seconds(boundary_bytes(run), run.tensor)


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


# --- two levels ------------------------------------------------------------------------------------------------------


def machines_of(facts: Facts) -> Cluster | None:
    """Those of a run, if all its ranks are on machines with as many of them, and their rates are known."""
    ranks, in_machine = spread(facts)
    rates = facts.machine.rates
    if not crosses(facts) or ranks % in_machine or rates is None or not rates.net_across_bytes_per_s:
        return None
    return cluster_of(facts, rates, ranks)


def _two_level(facts: Facts) -> Cluster | None:
    return machines_of(facts) if facts.run.two_level else None


def _sent(facts: Facts) -> float:
    ranks, _ = spread(facts)
    return (ranks - 1) / ranks * MESSAGE_BYTES


def phases(on: Cluster, num_bytes: float, slices: int, roads: Sequence[Road] = SUMS + GATHERS) -> float:
    """Seconds of ``roads``, one phase after the other for each slice; by default of an all-reduce."""
    assert on.across is not None
    in_machine, count = on.per_machine, on.ranks // on.per_machine
    sent = {"inside": (in_machine - 1) / in_machine * num_bytes, "across": (count - 1) / count * num_bytes / in_machine}
    wires = {"inside": on.inside, "across": on.across}
    piece = {road: sent[road] / slices / wire.bytes_per_s + wire.latency_s for road, wire in wires.items()}
    timeline, arrived = Timeline(), [0.0] * slices
    for tick in range(slices + len(roads)):
        for number, road in enumerate(roads):
            if 0 <= (index := tick - number) < slices:
                issued = timeline.add("host", 0.0, arrived[index])
                arrived[index] = timeline.add(road, piece[road], issued)
    return max(arrived)


def best(on: Cluster, num_bytes: float) -> int:
    """How many slices take the least."""
    return min(SLICES, key=lambda slices: (phases(on, num_bytes, slices), slices))
