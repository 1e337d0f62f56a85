"""What to keep for backward: milliseconds paid per byte freed, block by block.

A block that is recomputed keeps its input and the outputs of some operators; an operator whose output is not kept runs
again, and nothing else depends on that choice. So bytes and seconds simply add up, and the best ways to recompute a
block are the prefixes of its operators in the order of seconds per byte: its *ladder*, from "keep everything" down to
"keep the input". Steps that pay worse than a later one are left out.

All blocks together go down the ladder one block and one rung at a time, first blocks first: their saved tensors wait
longest, and while they run again those of later blocks are gone. That is one line of plans, on which bytes only fall
and seconds only rise, so the cheapest plan that fits is found by halving. Finally the block at the border may skip to
any other way of keeping that fits as well and costs less.

Compared with the best of all plans, by enumeration, in ``tests/unit/test_planner_keep.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strategies.core.facts import NO_WORK, Choices, Facts, Operator, Unit, Work
from strategies.core.plan import NONE, Keep

FULL, SELECTIVE, AUTO = "full", "selective", "auto"
EXPENSIVE = ("linear", "attention")  # kinds of operators whose outputs are small for what they cost


Pace = Callable[[Work], float]  # seconds of work on the device


def pace_of(facts: Facts) -> Pace:
    """Where nobody knows the device's rates only their proportion counts: 100 operations per byte, as GPUs have."""
    rates, precision = facts.machine.rates, facts.run.precision
    if rates is not None:
        return lambda work: rates.seconds(work, precision)
    return lambda work: work.flops / 1e14 + work.touched_bytes / 1e12


@dataclass(frozen=True, slots=True)
class Way:
    """One way to keep a block: bytes from forward on and while backward runs, what is kept, what is done again."""

    policy: str
    saved_bytes: int
    running_bytes: int
    kept: tuple[str, ...] = ()
    again: Work = NO_WORK

    def keep(self, unit: str, reason: str, *, is_open: bool = False) -> Keep:
        """The answer for ``unit``."""
        return Keep(
            unit=unit,
            reason=reason,
            policy=self.policy,
            saved_bytes=self.saved_bytes,
            kept=self.kept,
            again=self.again,
            open=is_open,
        )


def everything(unit: Unit) -> Way:
    """As autograd does it."""
    return Way(NONE, unit.saved_bytes, unit.saved_bytes)


def by_policy(unit: Unit, policy: str) -> Way:
    """``unit`` under a fixed policy; everything is kept where that takes no more bytes, or nothing can be chosen."""
    choices = unit.choices
    if choices is None or policy == NONE:
        return everything(unit)
    kept = [op for op in choices.operators if policy == SELECTIVE and op.name.split()[0] in EXPENSIVE]
    way = _way(policy, choices, kept)
    return way if way.saved_bytes < unit.saved_bytes else everything(unit)


def ladder(unit: Unit, pace: Pace) -> list[Way]:
    """Ways to keep ``unit``, from the most bytes to the fewest; each step pays more per byte than the one before."""
    ways = sorted(_ways(unit, pace), key=lambda way: (pace(way.again), way.saved_bytes))
    found: list[Way] = []
    for way in ways:
        if found and way.saved_bytes >= found[-1].saved_bytes:
            continue
        while len(found) > 1 and _price(found[-2], found[-1], pace) >= _price(found[-1], way, pace):
            found.pop()
        found.append(way)
    return found


def _price(before: Way, after: Way, pace: Pace) -> float:
    """Seconds per byte of a step down."""
    return (pace(after.again) - pace(before.again)) / (before.saved_bytes - after.saved_bytes)


def _ways(unit: Unit, pace: Pace) -> list[Way]:
    """Everything, and the input with a prefix of the operators, the dearest per byte first."""
    if unit.choices is None:
        return [everything(unit)]
    best = sorted(unit.choices.operators, key=lambda op: -pace(op.work) / max(1, op.num_bytes))
    prefixes = [_way(AUTO, unit.choices, best[:number]) for number in range(len(best) + 1)]
    return [everything(unit), *(way for way in prefixes if way.saved_bytes < unit.saved_bytes)]


def _way(policy: str, choices: Choices, kept: Sequence[Operator]) -> Way:
    names = {op.name for op in kept}
    again = sum((op.work for op in choices.operators if op.name not in names), choices.rest)
    return Way(
        policy=policy,
        saved_bytes=choices.input_bytes + sum(op.num_bytes for op in kept),
        running_bytes=choices.running_bytes,
        kept=tuple(op.name for op in choices.operators if op.name in names),
        again=again,
    )


@dataclass(frozen=True, slots=True)
class Line:
    """The line of plans: ``ladders`` of all units in order, and their ways at a place of it."""

    ladders: tuple[tuple[Way, ...], ...]

    @classmethod
    def of(cls, units: Sequence[Unit], pace: Pace) -> Line:
        known: dict[tuple[object, ...], tuple[Way, ...]] = {}  # blocks are mostly alike
        return cls(
            tuple(
                known.setdefault((unit.saved_bytes, unit.choices), tuple(ladder(unit, pace)))
                if (unit.saved_bytes, unit.choices) not in known
                else known[unit.saved_bytes, unit.choices]
                for unit in units
            )
        )

    @property
    def length(self) -> int:
        """Steps from everything kept to nothing kept."""
        return sum(len(rungs) - 1 for rungs in self.ladders)

    def at(self, place: int) -> list[Way]:
        """The ways after ``place`` steps: rung by rung, in each rung the first blocks first."""
        rungs = [0] * len(self.ladders)
        for depth in range(1, max(map(len, self.ladders), default=1)):
            for index, ladder_ in enumerate(self.ladders):
                if depth < len(ladder_) and place > 0:
                    rungs[index], place = depth, place - 1
        return [ladder_[rung] for ladder_, rung in zip(self.ladders, rungs, strict=True)]


def cheapest(units: Sequence[Unit], pace: Pace, peak: Callable[[Sequence[Way]], int], budget: int) -> list[Way]:
    """The ways of ``units`` that take the least time and whose ``peak`` is within ``budget``.

    Where none is, those with the lowest peak.
    """
    line = Line.of(units, pace)
    low, high = 0, line.length
    if peak(line.at(high)) > budget:
        return min((line.at(place) for place in range(high + 1)), key=peak)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(line.at(middle)) <= budget else (middle + 1, high)
    found = line.at(low)
    return min((ways for ways in (found, *_finished(line, low, units, pace)) if peak(ways) <= budget), key=_cost(pace))


def _finished(line: Line, place: int, units: Sequence[Unit], pace: Pace) -> list[list[Way]]:
    """The plan one step before ``place``, with the block that the step moves kept in any other way."""
    if place == 0:
        return []
    before, after = line.at(place - 1), line.at(place)
    moved = next(index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] is not pair[1])
    return [[*before[:moved], way, *before[moved + 1 :]] for way in _ways(units[moved], pace)]


def _cost(pace: Pace) -> Callable[[Sequence[Way]], float]:
    return lambda ways: sum(pace(way.again) for way in ways)


def kept_as(facts: Facts, ways: Sequence[Way]) -> Facts:
    """``facts`` in which backward does again what ``ways`` say: what the price of a step is counted from."""
    pairs = zip(facts.units, ways, strict=True)
    return replace(facts, units=tuple(replace(unit, again=way.again) for unit, way in pairs))
