"""Parts of a model: consecutive units, of which each stage of a pipeline has one part, as ``strategies.pipeline`` cuts
them by itself (``cuts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from deepstow.strategies.core.facts import Facts, Unit, UnitKind
from deepstow.strategies.planner.cuts import Schedule, cut
from deepstow.strategies.planner.hybrid.degrees import Degrees, Size, Stowed

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
        whole, trained = head.num_params + table.num_params, head.num_trainable + table.num_trainable
        return (*units[:-1], replace(head, num_params=whole, num_trainable=trained))

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
