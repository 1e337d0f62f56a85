"""What to keep for backward: milliseconds paid per byte freed, block by block.

A block that is recomputed keeps its input and the outputs of some operators; an operator whose output is not kept runs
again, and nothing else depends on that choice. So bytes and seconds simply add up, and the best ways to recompute a
block are the prefixes of its operators in the order of seconds per byte: its *ladder*, from "keep everything" down to
"keep the input". Steps that pay worse than a later one are left out.

All blocks together go down their ladders one step at a time, the cheapest per byte first, and of equal ones that of the
first block: its saved tensors wait longest, and while it runs again those of later blocks are gone. That is one line of
plans, on which bytes only fall and seconds only rise: the first plan that fits is the one. Finally the block at the
border may skip to any other way of keeping that fits as well and costs less. The last block is tried both ways: its
backward begins at once, so that little is freed there.

Compared with the best of all plans, by enumeration, in ``tests/unit/test_planner_keep.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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


class Line:
    """The line of plans for ``units``: at place n, n steps down their ladders are taken, the cheapest ones."""

    def __init__(self, units: Sequence[Unit], pace: Pace) -> None:
        known: dict[tuple[object, ...], list[Way]] = {}  # blocks are mostly alike
        self._ladders: list[list[Way]] = []
        for unit in units:
            key = (unit.saved_bytes, unit.choices)
            if key not in known:
                known[key] = ladder(unit, pace)
            self._ladders.append(known[key])
        steps = [
            (_price(before, after, pace), rung, index)
            for index, rungs in enumerate(self._ladders)
            for rung, (before, after) in enumerate(pairwise(rungs))
        ]
        self.moves = [index for *_, index in sorted(steps)]  # of alike blocks the first ones first

    def at(self, place: int) -> list[Way]:
        """The ways of all units after ``place`` steps."""
        taken = Counter(self.moves[:place])
        return [rungs[taken[index]] for index, rungs in enumerate(self._ladders)]


def cheapest(units: Sequence[Unit], pace: Pace, peak: Callable[[Sequence[Way]], int], budget: int) -> list[Way]:
    """The ways of ``units`` that take the least time and whose ``peak`` is within ``budget``.

    Where none is, those with the lowest peak.
    """
    # Backward begins with the last block: its saved tensors are all there at the peak, unless a head's is higher.
    last = max((index for index, unit in enumerate(units) if unit.choices), default=0)
    spared = [replace(unit, choices=None) if index == last else unit for index, unit in enumerate(units)]
    tried: list[list[Way]] = []
    for some in (units, spared):
        line = Line(some, pace)
        places = range(len(line.moves) + 1)
        first = next((place for place in places if peak(line.at(place)) <= budget), None)
        if first is None:
            tried.append(min(map(line.at, places), key=peak))
        else:
            tried += [line.at(first), *_finished(line, first, some, pace)]
    fitting = [ways for ways in tried if peak(ways) <= budget]
    return min(fitting, key=_cost(pace)) if fitting else min(tried, key=peak)


def _finished(line: Line, place: int, units: Sequence[Unit], pace: Pace) -> list[list[Way]]:
    """The plan one step before ``place``, with the block that the step moves kept in any other way."""
    if place == 0:
        return []
    before, moved = line.at(place - 1), line.moves[place - 1]
    return [[*before[:moved], way, *before[moved + 1 :]] for way in _ways(units[moved], pace)]


def _cost(pace: Pace) -> Callable[[Sequence[Way]], float]:
    return lambda ways: sum(pace(way.again) for way in ways)


def kept_as(facts: Facts, ways: Sequence[Way]) -> Facts:
    """``facts`` in which backward does again what ``ways`` say: what the price of a step is counted from."""
    pairs = zip(facts.units, ways, strict=True)
    return replace(facts, units=tuple(replace(unit, again=way.again) for unit, way in pairs))
