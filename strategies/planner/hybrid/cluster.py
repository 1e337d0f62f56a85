"""Ranks on machines, and what their collectives cost: a latency per message and a rate, inside a machine and across.

A group is ``size`` ranks, each ``stride`` after the one before. Tensor groups have stride 1, data groups the tensor
degree, and stages are next to each other in blocks of tensor x data ranks; so what talks most is nearest (the order of
Megatron-LM and of torch's device meshes).

A collective is hierarchical: with ``g`` ranks of the group in a machine, ``n`` machines and ``S`` bytes, a gather or a
reduce-scatter takes (g-1)/g S at the rate inside, and (n-1)/n S/g at the rate across, since every rank has a part of
the network. Each phase has log2 latencies per message, as trees do. Rates are per rank, one direction, while as much
comes back. What compute hides is decided by who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of connection: bytes per second of a rank, each way, and seconds per message."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """``ranks``, of which ``per_machine`` share a machine. Machines are full; ``across``: None if there is one."""

    ranks: int
    per_machine: int
    inside: Wire
    across: Wire | None = None

    def spread(self, size: int, stride: int) -> tuple[int, int]:
        """Ranks of a group in one machine, and the machines that it is on."""
        here = max(1, min(size, self.per_machine // stride))
        return here, ceil(size / here)

    def gather_seconds(self, num_bytes: float, size: int, stride: int = 1, messages: int = 1) -> float:
        """Gather ``num_bytes`` that ``size`` ranks have in equal parts, or reduce and scatter as many."""
        here, machines = self.spread(size, stride)
        inside = _phase(num_bytes, here, self.inside, messages)
        if self.across is None or machines == 1:
            return inside
        return inside + _phase(num_bytes / here, machines, self.across, messages)

    def all_reduce_seconds(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Sum ``num_bytes`` of each of ``size`` ranks on all of them."""
        return 2 * self.gather_seconds(num_bytes, size, stride)

    def send_seconds(self, num_bytes: float, stage: int, ranks_of_stage: int) -> float:
        """Send ``num_bytes`` from a rank of ``stage`` to the same one of the next stage."""
        first, last = stage * ranks_of_stage, (stage + 2) * ranks_of_stage - 1
        same = first // self.per_machine == last // self.per_machine
        wire = self.inside if same or self.across is None else self.across
        return wire.latency_s + num_bytes / wire.bytes_per_s


def _phase(num_bytes: float, size: int, wire: Wire, messages: int) -> float:
    """A gather of ``num_bytes`` over ``size`` ranks that all have the same wire."""
    if size == 1:
        return 0.0
    return messages * ceil(log2(size)) * wire.latency_s + (size - 1) / size * num_bytes / wire.bytes_per_s
