"""What the search chooses, which of it can be run at all, and what a rank then has of the model.

Parts are consecutive units, of which each stage of a pipeline has one part, as ``strategies.pipeline`` cuts them by
itself (``cuts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from deepstow.strategies.core.facts import Compression, Facts, Unit, UnitKind
from deepstow.strategies.planner.cuts import Schedule, cut


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
    across = any(size > 1 and per_machine % size for size in (d.tensor, d.sequence))  # these stay inside a machine
    waiting = d.stages > 1 and d.zero >= 2  # these exchange at every micro-batch, which a pipeline does not wait for
    replicated = d.offload is Stowed.WEIGHTS and d.zero in (1, 2)  # these keep all weights on each device
    hosted = d.offload is Stowed.STATE and d.zero == 3  # its weights rest on the host with the state
    stowed = d.exchange is not None and d.offload is not Stowed.NOTHING
    return not (across or waiting or replicated or hosted or stowed)


# --- shares of the model ---------------------------------------------------------------------------------------------

Known = Mapping[Size, Facts]  # of one rank


class Part(NamedTuple):
    """The units from number ``start`` to before ``end``."""

    start: int
    end: int


@dataclass(frozen=True)
class Model:
    """The units of one tensor rank's share of a model, for one size of micro-batch."""

    facts: Facts

    @cached_property
    def blocks(self) -> int:
        return sum(unit.kind is UnitKind.BLOCK for unit in self.facts.units)

    @cached_property
    def _like(self) -> list[int]:
        """Per unit, the first one that is the same but for its name."""
        first: dict[Unit, int] = {}
        return [first.setdefault(replace(unit, name=""), index) for index, unit in enumerate(self.facts.units)]

    def key(self, part: Part) -> tuple[int, ...]:
        """The same for parts with the same numbers."""
        return tuple(self._like[part.start : part.end])

    def units(self, part: Part) -> tuple[Unit, ...]:
        """The units of ``part``, in order; a last stage has a copy of a tied table."""
        units = self.facts.units[part.start : part.end]
        if part.start == 0 or part.end < len(self.facts.units) or not self.facts.run.tied:
            return units
        table, head = self.facts.units[0], units[-1]
        num_params, trained = head.num_params + table.num_params, head.num_trainable + table.num_trainable
        return (*units[:-1], replace(head, num_params=num_params, num_trainable=trained))

    @cached_property
    def _parts(self) -> dict[int, list[Part]]:
        return {1: [Part(0, len(self.facts.units))]}

    def parts(self, stages: int) -> list[Part]:
        """The part of each stage."""
        if stages not in self._parts:
            sizes = [len(names) for names in cut(self.facts.units, Schedule.ONE_F_ONE_B, stages).parts]
            pairs = zip(sizes, accumulate(sizes), strict=True)
            self._parts[stages] = [Part(end - size, end) for size, end in pairs]
        return self._parts[stages]


class Models:
    """What a rank runs.

    Args:
        known: facts of a rank's share of the model and of the rows; with rates and counted operations.
        in_stages: the same of stages in torch's pipeline, plain training under autocast; none: stages are run by the
            engine that runs all else, as in Megatron-LM.
    """

    def __init__(self, known: Known, in_stages: Known | None = None) -> None:
        self.sizes = tuple(known)
        self._whole = {key: Model(facts) for key, facts in known.items()}
        self._staged = {key: Model(facts) for key, facts in (in_stages or {}).items()}

    @property
    def torchs(self) -> bool:
        """Whether stages are run by torch's pipeline."""
        return bool(self._staged)

    def plain(self, degrees: Degrees) -> bool:
        """Whether a stage of these degrees trains plainly; others are the memory engine's, or cannot be run here."""
        divided = degrees.stages > 1 or degrees.exchange is not None
        return divided and degrees.zero <= 1 and degrees.offload is Stowed.NOTHING and self.torchs

    def of(self, degrees: Degrees) -> Model:
        """The model that these degrees divide."""
        if self.plain(degrees):
            return self._staged[degrees.size]
        return self._whole[degrees.size]
