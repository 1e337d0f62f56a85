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

With a price per byte on the link there are more ways: what a block keeps may wait on the host, its input alone or all
of it. Whatever is dearer to make again than that price then goes there. What the last block saves is wanted at once,
and what the one before it sent would arrive beside that, at the peak: these two send nothing.

Compared with the best of all plans, by enumeration, in ``tests/unit/test_planner_keep.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from strategies.core.facts import NO_WORK, Choices, Facts, Operator, Unit, UnitKind, Work
from strategies.core.peak import Saved, host_room
from strategies.core.plan import INPUT, NONE, Keep

FULL, SELECTIVE, AUTO = "full", "selective", "auto"
EXPENSIVE = ("linear", "attention")  # kinds of operators whose outputs are small for what they cost
GPU_PROPORTION, CPU_PROPORTION = 100, 5  # floating-point operations in the time of one byte, where nobody measured it


Pace = Callable[[Work], float]  # seconds of work on the device


def pace_of(facts: Facts) -> Pace:
    """Where nobody knows the device's rates only their proportion counts: operations in the time of a byte."""
    machine, precision = facts.machine, facts.run.precision
    rates, proportion = machine.rates, GPU_PROPORTION if machine.has_accelerator else CPU_PROPORTION
    if rates is not None:
        return lambda work: rates.seconds(work, precision)
    return lambda work: work.flops / proportion + work.touched_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """One way to keep a block: bytes from forward on and in backward, what is kept, done again, and on the host."""

    policy: str
    saved_bytes: int
    running_bytes: int
    kept: tuple[str, ...] = ()
    again: Work = NO_WORK
    hosted: tuple[str, ...] = ()
    hosted_bytes: int = 0

    @property
    def saved(self) -> Saved:
        """As the peak counts it."""
        return Saved(self.saved_bytes, self.running_bytes, self.hosted_bytes)

    def keep(self, unit: str, reason: str, *, is_open: bool = False, may_host: bool = False) -> Keep:
        """The answer for ``unit``; ``is_open`` and ``may_host`` say what a later phase may change."""
        return Keep(
            unit=unit,
            reason=reason,
            policy=self.policy,
            saved_bytes=self.saved_bytes,
            kept=self.kept,
            hosted=self.hosted,
            hosted_bytes=self.hosted_bytes,
            again=self.again,
            open=is_open,
            may_host=may_host,
        )


def everything(unit: Unit) -> Way:
    """As autograd does it."""
    return Way(NONE, unit.saved_bytes, unit.saved_bytes)


def by_policy(unit: Unit, policy: str, *, hosts: bool = False) -> Way:
    """``unit`` under a fixed policy; everything is kept where that takes no more bytes, or nothing can be chosen.

    Args:
        hosts: what is kept waits on the host.
    """
    choices = unit.choices
    if choices is None or policy == NONE:
        return everything(unit)
    kept = [op for op in choices.operators if policy == SELECTIVE and op.name.split()[0] in EXPENSIVE]
    way = _way(policy, choices, kept, _all_of(kept) if hosts and choices.stream_bytes else ())
    return way if way.saved_bytes < unit.saved_bytes else everything(unit)


@dataclass(frozen=True, slots=True)
class Prices:
    """What a way to keep a block is taken to cost.

    Args:
        pace: seconds of what is done again.
        link_s: seconds per byte that goes to the host and comes back; None: nothing may.
        inputs_only: outputs of operators may not.
        senders: units before this one may send, the others not: the host may be too small for all.
    """

    pace: Pace
    link_s: float | None = None
    inputs_only: bool = False
    senders: int | None = None

    def of(self, way: Way) -> float:
        """Seconds per micro-batch."""
        return self.pace(way.again) + (self.link_s or 0.0) * way.hosted_bytes

    def per_byte(self, before: Way, after: Way) -> float:
        """Seconds per byte of a step down."""
        return (self.of(after) - self.of(before)) / (before.saved_bytes - after.saved_bytes)


def ladder(unit: Unit, prices: Prices) -> list[Way]:
    """Ways to keep ``unit``, from the most bytes to the fewest; each step pays more per byte than the one before."""
    found: list[Way] = []
    for way in sorted(_ways(unit, prices), key=lambda way: (prices.of(way), way.saved_bytes)):
        if found and way.saved_bytes >= found[-1].saved_bytes:
            continue
        while len(found) > 1 and prices.per_byte(found[-2], found[-1]) >= prices.per_byte(found[-1], way):
            found.pop()
        found.append(way)
    return found


def _ways(unit: Unit, prices: Prices) -> list[Way]:
    """Everything; and the input with a prefix of the operators, the dearest per byte first.

    Each of these with all of it on the device, with the input on the host, and with all of it there.
    """
    if unit.choices is None:
        return [everything(unit)]
    best = sorted(unit.choices.operators, key=lambda op: -prices.pace(op.work) / max(1, op.num_bytes))
    prefixes = [best[:number] for number in range(len(best) + 1)]
    ways = [_way(AUTO, unit.choices, kept) for kept in prefixes]
    if prices.link_s is not None and unit.choices.stream_bytes:
        ways += [_way(AUTO, unit.choices, kept, (INPUT,)) for kept in prefixes]
        ways += [_way(AUTO, unit.choices, kept, _all_of(kept)) for kept in prefixes[1:] if not prices.inputs_only]
    return [everything(unit), *(way for way in ways if way.saved_bytes < unit.saved_bytes)]


def _all_of(kept: Sequence[Operator]) -> tuple[str, ...]:
    return (INPUT, *(op.name for op in kept))


def _way(policy: str, choices: Choices, kept: Sequence[Operator], hosted: Sequence[str] = ()) -> Way:
    sizes = {INPUT: choices.stream_bytes, **{op.name: op.num_bytes for op in kept}}
    names = (INPUT, *(op.name for op in choices.operators))
    on_host = sum(sizes[name] for name in hosted)
    return Way(
        policy=policy,
        saved_bytes=choices.input_bytes + sum(op.num_bytes for op in kept) - on_host,
        running_bytes=choices.running_bytes,
        kept=tuple(name for name in names[1:] if name in sizes),
        again=sum((op.work for op in choices.operators if op.name not in sizes), choices.rest),
        hosted=tuple(name for name in names if name in hosted),
        hosted_bytes=on_host,
    )


class Line:
    """The line of plans for ``units``: at place n, n steps down their ladders are taken, the cheapest ones."""

    def __init__(self, units: Sequence[Unit], prices: Prices) -> None:
        self._units = units
        known: dict[tuple[object, ...], list[Way]] = {}  # blocks are mostly alike
        self._ladders: list[list[Way]] = []
        end = _end_of_senders(units, prices)
        for index, unit in enumerate(units):
            its = prices if index < end else replace(prices, link_s=None)
            key = (unit.saved_bytes, unit.choices, its.link_s)
            if key not in known:
                known[key] = ladder(unit, its)
            self._ladders.append(known[key])
        # The first block is given the masks that all share, and counts them. It is like the others for all that: who
        # does the same work pays the same price, and the first comes first.
        paid: dict[object, list[float]] = {}
        steps = [
            (price, rung, index)
            for index, (unit, rungs) in enumerate(zip(units, self._ladders, strict=True))
            for rung, price in enumerate(paid.setdefault(_likeness(unit, rungs), _steps(rungs, prices)))
        ]
        self.moves = [index for *_, index in sorted(steps)]  # of alike blocks the first ones first

    def at(self, place: int) -> list[Way]:
        """The ways of all units after ``place`` steps."""
        return _with_shared(self._units, self.bare(place))

    def bare(self, place: int) -> list[Way]:
        """The same, each way as its block alone would have it."""
        taken = Counter(self.moves[:place])
        return [rungs[taken[index]] for index, rungs in enumerate(self._ladders)]

    def most_hosted(self) -> list[int]:
        """Room on the host for what each unit sends at most, at any place."""
        return [max(host_room(way.hosted_bytes, len(way.hosted)) for way in rungs) for rungs in self._ladders]


def _with_shared(units: Sequence[Unit], ways: list[Way]) -> list[Way]:
    """``ways`` with the inputs that blocks share, such as masks, in the account of the first block that keeps them.

    They are counted with the first block. Where that is not recomputed and does not save them, the first that is does.
    """
    first = next((index for index, unit in enumerate(units) if unit.choices), 0)
    heir = next((index for index, way in enumerate(ways) if way.policy != NONE), 0)
    choices = units[first].choices
    if choices is None or heir <= first:
        return ways
    shared = min(choices.running_bytes - units[first].saved_bytes, choices.input_bytes - choices.stream_bytes)
    way = ways[heir]
    ways[heir] = replace(way, saved_bytes=way.saved_bytes + shared, running_bytes=way.running_bytes + shared)
    return ways


def _likeness(unit: Unit, rungs: Sequence[Way]) -> object:
    choices = unit.choices
    return (len(rungs), choices and (choices.operators, choices.rest))


def _steps(rungs: Sequence[Way], prices: Prices) -> list[float]:
    return [prices.per_byte(before, after) for before, after in pairwise(rungs)]


def _end_of_senders(units: Sequence[Unit], prices: Prices) -> int:
    """Units before this one may send: of all blocks the last two never do."""
    end = last_block(units) - 1
    return end if prices.senders is None else min(end, prices.senders)


def within_host(units: Sequence[Unit], prices: Prices, spare: int) -> Prices:
    """``prices`` with as many senders, from the first, as ``spare`` bytes on the host hold."""
    if prices.link_s is None:
        return prices
    totals = accumulate(Line(units, prices).most_hosted())
    return replace(prices, senders=next((index for index, total in enumerate(totals) if total > spare), None))


def last_block(units: Sequence[Unit]) -> int:
    """The place of the last block; what it saves is wanted at once."""
    return max((index for index, unit in enumerate(units) if unit.kind is UnitKind.BLOCK), default=0)


def cheapest(units: Sequence[Unit], prices: Prices, peak: Callable[[Sequence[Way]], int], budget: int) -> list[Way]:
    """The ways of ``units`` that take the least time and whose ``peak`` is within ``budget``.

    Where none is, those with the lowest peak.
    """
    # Backward begins with the last block: its saved tensors are all there at the peak, unless a head's is higher.
    last = max((index for index, unit in enumerate(units) if unit.choices), default=0)
    spared = [replace(unit, choices=None) if index == last else unit for index, unit in enumerate(units)]
    tried: list[list[Way]] = []
    for some in (units, spared):
        line = Line(some, prices)
        along = range(len(line.moves) + 1)
        first = next((place for place in along if peak(line.at(place)) <= budget), None)
        if first is None:
            tried.append(min(map(line.at, along), key=peak))
        else:
            tried += [line.at(first), *_finished(line, first, some, prices)]
    fitting = [ways for ways in tried if peak(ways) <= budget]
    return min(fitting, key=lambda ways: sum(map(prices.of, ways))) if fitting else min(tried, key=peak)


def _finished(line: Line, place: int, units: Sequence[Unit], prices: Prices) -> list[list[Way]]:
    """The plan one step before ``place``, with the block that the step moves kept in any other way."""
    if place == 0:
        return []
    before, moved = line.bare(place - 1), line.moves[place - 1]
    may_send = moved < _end_of_senders(units, prices)
    ways = _ways(units[moved], prices if may_send else replace(prices, link_s=None))
    others = ([*before[:moved], way, *before[moved + 1 :]] for way in ways)
    return [_with_shared(units, each) for each in others]
