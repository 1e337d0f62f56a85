"""What forward keeps for backward: seconds paid per byte freed, block by block.

A recomputed block keeps its input and the outputs of some operators; an operator whose output is not kept runs again.
Bytes and seconds simply add up, so the best options for a block are the prefixes of its operators in the order of
seconds per byte: its *frontier*, without options that cost more per byte than a later one.

All blocks together move along their frontiers one option at a time, the cheapest per byte first, and of equal ones that
of the first block: its saved tensors wait longest, and while it runs again those of later blocks are gone. On that
trade-off curve bytes only fall and seconds only rise, so the first position that fits is the best on it. Finally the
block that moved last may use any other option that fits as well and costs less. The last block is tried both ways: its
backward begins at once, so recomputing it frees little.

With a cost per byte on the link, what a block keeps may wait on the host, only its input or all of it. The last two
blocks send nothing: what the last one saves is needed at once, and that of the one before would arrive at the peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from deepstow.strategies.core.facts import NO_WORK, Facts, Operator, Temporaries, Unit, UnitKind, Work
from deepstow.strategies.core.peak import Saved, host_room
from deepstow.strategies.core.plan import INPUT, NONE, Keep

WORTH_BYTES = 64 << 20  # of logits in fp32, from which their loss is computed by chunks by default
FULL = "full"
SELECTIVE = "selective"
AUTO = "auto"
EXPENSIVE = ("linear", "attention")  # kinds of operators whose outputs are small for what they cost
GPU_PROPORTION, CPU_PROPORTION = 100, 5  # floating-point operations in the time of one byte, if the rates are unknown


def work_seconds(facts: Facts) -> Callable[[Work], float]:
    """Seconds of work on the device; with unknown rates only proportional to them."""
    machine, precision = facts.machine, facts.run.computes_in
    rates, proportion = machine.rates, GPU_PROPORTION if machine.has_accelerator else CPU_PROPORTION
    if rates is not None:
        return lambda work: rates.seconds(work, precision)
    return lambda work: work.flops / proportion + work.touched_bytes


@dataclass(frozen=True)
class KeepOption:
    """One option for a block: bytes from forward on and in backward, what is kept, recomputed, and on the host."""

    policy: str
    saved_bytes: int
    running_bytes: int
    kept: tuple[str, ...] = ()
    again: Work = NO_WORK
    hosted: tuple[str, ...] = ()
    hosted_bytes: int = 0
    temporaries: Temporaries | None = None

    @cached_property
    def saved(self) -> Saved:
        """The bytes that ``peak.py`` counts."""
        return Saved(self.saved_bytes, self.running_bytes, self.hosted_bytes, self.temporaries)

    def keep(self, unit: str, reason: str, *, is_open: bool = False, may_host: bool = False) -> Keep:
        """The decision for ``unit``; ``is_open`` and ``may_host`` say what a later phase may change."""
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


def keep_all(unit: Unit) -> KeepOption:
    """Everything that autograd saves."""
    return KeepOption(NONE, unit.saved_bytes, unit.saved_bytes, temporaries=unit.temporaries)


def by_policy(unit: Unit, policy: str, *, hosts: bool = False) -> KeepOption:
    """``unit`` under a fixed policy; everything is kept if that takes no more bytes, or nothing can be chosen.

    Args:
        hosts: what is kept waits on the host.
    """
    choices = unit.choices
    if choices is None or policy == NONE:
        return keep_all(unit)
    kept = [op for op in choices.operators if policy == SELECTIVE and op.name.split()[0] in EXPENSIVE]
    option = _option(policy, unit, kept, _all_of(kept) if hosts and choices.stream_bytes else ())
    return option if option.saved_bytes < unit.saved_bytes else keep_all(unit)


@dataclass(frozen=True, slots=True)
class KeepCosts:
    """What an option costs.

    Args:
        work_seconds: seconds of recomputed work.
        link_s: seconds per byte that goes to the host and comes back; None: nothing may go there.
        inputs_only: only inputs of blocks may go there, no outputs of operators.
        senders: as many units may send, of those that may at all: the host may be too small for all.
        spread: these are not the first ones, but one here and one there, so that the link is never asked for much.
    """

    work_seconds: Callable[[Work], float]
    link_s: float | None = None
    inputs_only: bool = False
    senders: int | None = None
    spread: bool = False

    def of(self, option: KeepOption) -> float:
        """Seconds per micro-batch."""
        return self.work_seconds(option.again) + (self.link_s or 0.0) * option.hosted_bytes

    def per_byte(self, before: KeepOption, after: KeepOption) -> float:
        """Seconds per byte that is freed by going from one option to the next."""
        return (self.of(after) - self.of(before)) / (before.saved_bytes - after.saved_bytes)


def frontier(unit: Unit, costs: KeepCosts) -> list[KeepOption]:
    """The convex frontier of ``unit``, from the most bytes to the fewest; each byte costs more than the one before."""
    options: list[KeepOption] = []
    for option in sorted(_options(unit, costs), key=lambda option: (costs.of(option), option.saved_bytes)):
        if options and option.saved_bytes >= options[-1].saved_bytes:
            continue
        while len(options) > 1 and costs.per_byte(options[-2], options[-1]) >= costs.per_byte(options[-1], option):
            options.pop()
        options.append(option)
    return options


def _options(unit: Unit, costs: KeepCosts) -> list[KeepOption]:
    """Everything; and the input with each prefix of the operators, the dearest per byte first.

    Each of these with all of it on the device, with the input on the host, and with all of it there.
    """
    if unit.choices is None:
        return [keep_all(unit)]
    best = sorted(unit.choices.operators, key=lambda op: -costs.work_seconds(op.work) / max(1, op.num_bytes))
    prefixes = [best[:number] for number in range(len(best) + 1)]
    options = [_option(AUTO, unit, kept) for kept in prefixes]
    if costs.link_s is not None and unit.choices.stream_bytes:
        options += [_option(AUTO, unit, kept, (INPUT,)) for kept in prefixes]
        options += [_option(AUTO, unit, kept, _all_of(kept)) for kept in prefixes[1:] if not costs.inputs_only]
    return [keep_all(unit), *(option for option in options if option.saved_bytes < unit.saved_bytes)]


def _all_of(kept: Sequence[Operator]) -> tuple[str, ...]:
    return (INPUT, *(op.name for op in kept))


def _option(policy: str, unit: Unit, kept: Sequence[Operator], hosted: Sequence[str] = ()) -> KeepOption:
    choices = unit.choices
    assert choices is not None
    sizes = {INPUT: choices.stream_bytes, **{op.name: op.num_bytes for op in kept}}
    names = (INPUT, *(op.name for op in choices.operators))
    on_host = sum(sizes[name] for name in hosted)
    return KeepOption(
        policy=policy,
        saved_bytes=choices.input_bytes + sum(op.num_bytes for op in kept) - on_host,
        running_bytes=choices.running_bytes,
        kept=tuple(name for name in names[1:] if name in sizes),
        again=sum((op.work for op in choices.operators if op.name not in sizes), choices.rest),
        hosted=tuple(name for name in names if name in hosted),
        hosted_bytes=on_host,
        temporaries=unit.temporaries,
    )


class TradeoffCurve:
    """The trade-off curve of ``units``: at position n, the n cheapest moves along their frontiers are made."""

    def __init__(self, units: Sequence[Unit], costs: KeepCosts) -> None:
        self._units = units
        frontier_of: dict[tuple[object, ...], list[KeepOption]] = {}  # blocks are mostly alike
        self.frontiers: list[list[KeepOption]] = []
        for index, unit in enumerate(units):
            its = costs if _sends(index, units, costs) else replace(costs, link_s=None)
            key = (unit.saved_bytes, unit.choices, unit.temporaries, its.link_s)
            if key not in frontier_of:
                frontier_of[key] = frontier(unit, its)
            self.frontiers.append(frontier_of[key])
        # The first block also counts the masks that all blocks share. Apart from these it is like the others: blocks
        # that recompute the same work have the same cost per byte, and the first of them moves first.
        paid: dict[object, list[float]] = {}
        moves = []
        for index, (unit, options) in enumerate(zip(units, self.frontiers, strict=True)):
            alike = (len(options), unit.choices and (unit.choices.operators, unit.choices.rest))
            per_byte = [costs.per_byte(before, after) for before, after in pairwise(options)]
            moves += [(cost, rank, index) for rank, cost in enumerate(paid.setdefault(alike, per_byte))]
        self.moves = [index for *_, index in sorted(moves)]  # of alike blocks the first ones first

    def at(self, position: int) -> list[KeepOption]:
        """The options of all units after ``position`` moves."""
        return _with_shared(self._units, self.bare(position))

    def bare(self, position: int) -> list[KeepOption]:
        """The same without shared inputs."""
        num_moves = Counter(self.moves[:position])
        return [options[num_moves[index]] for index, options in enumerate(self.frontiers)]


def _with_shared(units: Sequence[Unit], options: list[KeepOption]) -> list[KeepOption]:
    """``options`` with the inputs that blocks share, such as masks, counted with the first block that keeps them.

    The facts count them with the first block. If that is not recomputed and does not save them, they are counted with
    the first block that is.
    """
    first = next((index for index, unit in enumerate(units) if unit.choices), 0)
    heir = next((index for index, option in enumerate(options) if option.policy != NONE), 0)
    choices = units[first].choices
    if choices is None or heir <= first:
        return options
    shared = min(choices.running_bytes - units[first].saved_bytes, choices.input_bytes - choices.stream_bytes)
    its = options[heir]
    options[heir] = replace(its, saved_bytes=its.saved_bytes + shared, running_bytes=its.running_bytes + shared)
    return options


def _sends(index: int, units: Sequence[Unit], costs: KeepCosts) -> bool:
    """Whether a unit may send; the last two blocks never do."""
    end = last_block(units) - 1
    senders = end if costs.senders is None else min(end, costs.senders)
    if index >= end or not costs.spread:
        return index < senders
    return (index + 1) * senders // end > index * senders // end


def within_host(units: Sequence[Unit], costs: KeepCosts, spare: int) -> KeepCosts:
    """``costs`` with as many senders, from the first, as ``spare`` bytes on the host hold."""
    if costs.link_s is None:
        return costs
    options_of = TradeoffCurve(units, costs).frontiers
    totals = accumulate(max(host_room(o.hosted_bytes, len(o.hosted)) for o in options) for options in options_of)
    return replace(costs, senders=next((index for index, total in enumerate(totals) if total > spare), None))


def last_block(units: Sequence[Unit]) -> int:
    """The index of the last block; what it saves is needed at once."""
    return max((index for index, unit in enumerate(units) if unit.kind is UnitKind.BLOCK), default=0)


def cheapest(
    units: Sequence[Unit], costs: KeepCosts, peak: Callable[[Sequence[KeepOption]], int], budget: int
) -> list[KeepOption]:
    """The options of ``units`` that take the least time and whose ``peak`` is within ``budget``.

    If none are, those with the lowest peak.
    """
    # Backward begins with the last block: its saved tensors are all there at the peak, unless a head's is higher.
    last = max((index for index, unit in enumerate(units) if unit.choices), default=0)
    spared = [replace(unit, choices=None) if index == last else unit for index, unit in enumerate(units)]
    tried: list[list[KeepOption]] = []
    for variant in (units, spared):
        curve = TradeoffCurve(variant, costs)
        peaks, first_fit = list[int](), None
        for position in range(len(curve.moves) + 1):
            peaks.append(peak(curve.at(position)))
            if peaks[-1] <= budget:
                first_fit = position
                break
        if first_fit is None:
            tried.append(curve.at(peaks.index(min(peaks))))
        else:
            tried += [curve.at(first_fit), *_other_last_moves(curve, first_fit, variant, costs)]
    fitting = [options for options in tried if peak(options) <= budget]
    return min(fitting, key=lambda options: sum(map(costs.of, options))) if fitting else min(tried, key=peak)


def _other_last_moves(
    curve: TradeoffCurve, position: int, units: Sequence[Unit], costs: KeepCosts
) -> list[list[KeepOption]]:
    """The plans that differ from the one at ``position`` in the option of the block that moved last."""
    if position == 0:
        return []
    before, moved = curve.bare(position - 1), curve.moves[position - 1]
    options = _options(units[moved], costs if _sends(moved, units, costs) else replace(costs, link_s=None))
    return [_with_shared(units, [*before[:moved], option, *before[moved + 1 :]]) for option in options]
