"""What the search chooses, and which of it can be run at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from deepstow.strategies.core.compression import Compression
from deepstow.strategies.core.facts import Facts


class Stowed(Enum):
    """What rests in host memory between its uses."""

    NOTHING = "none"
    STATE = "state"  # masters and moments, updated by the CPU
    WEIGHTS = "weights"  # and weights, fetched for each use


class Size(NamedTuple):
    """What a rank's share of the model and of the rows follows from."""

    micro_batch: int = 1
    tensor: int = 1
    sequence: int = 1
    experts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """One way to use all ranks: ``stages`` x ``tensor`` x ``data`` x ``sequence`` of them.

    Args:
        sequence: ranks that are given the same rows, and each a slice of them; ``data`` counts sets of these.
        experts: of the ``data`` ranks so many have all experts together.
        zero: ZeRO's stage over the copies of the model.
        recompute: a policy of ``strategies.recompute``: none, selective or full.
        micro_batch: sequences; ``micro_batches`` of them per step go through each pipeline.
        exchange: how plain data parallelism sends less, lossy; None: everything is sent.
    """

    stages: int = 1
    tensor: int = 1
    data: int = 1
    sequence: int = 1
    experts: int = 1
    zero: int = 0
    recompute: str = "none"
    offload: Stowed = Stowed.NOTHING
    micro_batch: int = 1
    micro_batches: int = 1
    exchange: Compression | None = None

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.stages * self.tensor * self.copies

    @property
    def copies(self) -> int:
        """Of the model. Their ranks add up gradients, and can share state."""
        return self.data * self.sequence

    @property
    def size(self) -> Size:
        return Size(self.micro_batch, self.tensor, self.sequence, self.experts)

    def exchanged(self, facts: Facts) -> Facts:
        """``facts`` with how these ranks exchange."""
        return replace(facts, run=replace(facts.run, compression=self.exchange, world_size=self.data))


def is_possible(degrees: Degrees, per_machine: int) -> bool:
    """Whether some engine could run it. What those of this project cannot run the strategies refuse (``keys.py``)."""
    d = degrees
    across = any(each > 1 and per_machine % each for each in (d.tensor, d.sequence))  # these stay inside a machine
    waiting = d.stages > 1 and d.zero >= 2  # these exchange at every micro-batch, which a pipeline does not wait for
    whole = d.offload is Stowed.WEIGHTS and d.zero in (1, 2)  # these keep all weights on each device
    apart = d.offload is Stowed.STATE and d.zero == 3  # its weights rest on the host with the state
    stowed = d.exchange is not None and d.offload is not Stowed.NOTHING
    return not (across or waiting or whole or apart or stowed)
