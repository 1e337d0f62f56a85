"""Ranks on machines, and what their collectives cost: a latency per hop and a rate, inside a machine and across.

A group is ``size`` ranks, each ``stride`` after the one before: 1 in tensor groups, the tensor degree in data groups;
stages are next to each other. So what talks most is nearest, as in Megatron-LM and torch's device meshes.

A gather or a reduce-scatter goes around a ring, of which libraries lay one per network card; a sum that all ranks need
goes along trees. With ``here`` of n ranks on a machine, S bytes take, at rates per rank and direction,

    gather, scatter     (n - 1) latency + (n - 1)/n S / min(rate inside, here x rate across)
    sum                 2 log2 n latency + 2 (n - 1)/n S / the same

Of networks across machines the latency per hop is 17 us, from 4.2 to 33, and compute hides nothing of what ZeRO 2 and 3
exchange at every micro-batch, or all of it, or a part between: docs/parallelism.md says from which publications.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

HOPEFUL, CAREFUL = 4.2 / 17, 33 / 17  # of the latency across machines


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
        wire = self._ring(size, stride)
        return messages * (size - 1) * wire.latency_s + (size - 1) / size * num_bytes / wire.bytes_per_s

    def all_reduce_seconds(self, num_bytes: float, size: int, stride: int = 1, messages: float = 1) -> float:
        """Sum ``num_bytes`` of each of ``size`` ranks on all of them."""
        wire = self._ring(size, stride)
        return 2 * (messages * ceil(log2(size)) * wire.latency_s + (size - 1) / size * num_bytes / wire.bytes_per_s)

    def send_seconds(self, num_bytes: float, stage: int, ranks_of_stage: int) -> float:
        """Send ``num_bytes`` from a rank of ``stage`` to the same one of the next stage."""
        first, last = stage * ranks_of_stage, (stage + 2) * ranks_of_stage - 1
        same = first // self.per_machine == last // self.per_machine
        wire = self.inside if same or self.across is None else self.across
        return wire.latency_s + num_bytes / wire.bytes_per_s

    def _machines(self, size: int, stride: int) -> tuple[int, int]:
        """Ranks of a group in one machine, and the machines that it is on."""
        here = max(1, min(size, self.per_machine // stride))
        return here, ceil(size / here) if self.across is not None else 1

    def _ring(self, size: int, stride: int) -> Wire:
        here, machines = self._machines(size, stride)
        if self.across is None or machines == 1:
            return self.inside
        return Wire(min(self.inside.bytes_per_s, here * self.across.bytes_per_s), self.across.latency_s)
