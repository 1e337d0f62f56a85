"""Parts of a model: consecutive blocks, with what is before the first and after the last one. A stage holds one part.

Splits give every stage but the last as many blocks, or one more to the later ones, in which fewer micro-batches are in
flight. The last stage also has the head: all numbers of blocks between what its operations alone suggest and an even
share are tried. The choice is by operations and not by seconds, so that it does not depend on a network or on memory:
the least over a family that is fixed can only fall if either gets better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

from strategies.core.facts import Facts, Unit, UnitKind
from strategies.planner.hybrid.degrees import Degrees, Size, Stowed
from strategies.planner.step_cost import unit_flops

MOST_SPLITS = 6
Known = Mapping[Size, Facts]  # of one rank


@dataclass(frozen=True, slots=True)
class Part:
    """``blocks`` of them from number ``first`` on."""

    first: int
    blocks: int
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Model:
    """The units of one tensor rank's share of a model, for one size of micro-batch."""

    facts: Facts

    @cached_property
    def _at(self) -> list[int]:
        """Indices of the blocks among the units."""
        return [index for index, unit in enumerate(self.facts.units) if unit.kind is UnitKind.BLOCK]

    @property
    def blocks(self) -> int:
        return len(self._at)

    @cached_property
    def alike(self) -> bool:
        """Whether the blocks between the first and the last are the same but for their names."""
        inner = {replace(self.facts.units[index], name="") for index in self._at[1:-1]}
        return len(inner) <= 1

    def key(self, part: Part) -> Part:
        """The same for parts with the same numbers."""
        return Part(1, part.blocks, part.begins, part.ends) if part.first and self.alike else part

    def span(self, part: Part) -> tuple[int, int]:
        """Indices of the part's units: from, and to before."""
        if not self._at:
            return 0, len(self.facts.units)
        start = 0 if part.begins else self._at[part.first]
        return start, len(self.facts.units) if part.ends else self._at[part.first + part.blocks - 1] + 1

    def units(self, part: Part) -> tuple[Unit, ...]:
        """The units of ``part``, in order; a last stage has a copy of a tied table."""
        start, end = self.span(part)
        units = self.facts.units[start:end]
        if part.begins or not part.ends or not self.facts.run.tied:
            return units
        table, head = self.facts.units[0], units[-1]
        whole, trained = head.num_params + table.num_params, head.num_trainable + table.num_trainable
        return (*units[:-1], replace(head, num_params=whole, num_trainable=trained))

    def splits(self, stages: int) -> Iterator[int]:
        """Numbers of blocks of the last stage that are worth trying."""
        if stages == 1:
            yield self.blocks
            return
        flops = unit_flops(self.facts)
        block = sum(flops[index] for index in self._at) / self.blocks
        behind = sum(flops[self._at[-1] + 1 :]) / block if block else 0.0
        most = max(1, min(-(-self.blocks // stages), self.blocks - (stages - 1)))
        least = min(most, max(1, floor((self.blocks + behind) / stages - behind)))
        step = -(-(most - least + 1) // MOST_SPLITS)
        yield from range(most, least - 1, -step)

    def parts(self, stages: int, last_blocks: int) -> list[Part]:
        """The part of each stage."""
        if stages == 1:
            return [Part(0, self.blocks, begins=True, ends=True)]
        rest, others = self.blocks - last_blocks, stages - 1
        counts = [rest // others + (index >= others - rest % others) for index in range(others)]
        found, first = [], 0
        for index, count in enumerate([*counts, last_blocks]):
            found.append(Part(first, count, begins=index == 0, ends=index == others))
            first += count
        return found


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
