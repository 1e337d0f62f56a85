"""Which weights are offloaded, and when they come back.

    which   the turns of the first blocks and the boundaries of the last ones: two numbers, which are enough if blocks
            are alike. Pairs come in order of a lower bound (compute, or the time of their copies)
    when    in order of need, each reload as early as memory allows, none before the one needed earlier (``issue``)

``issue`` looks at an iteration from the middle, where backward begins, and twice: the first pass finds how late the
last reload is issued, which bounds the first one of the next iteration. In 600 small instances this was the best of all
issue vectors, and more memory never made it slower for the same gaps (40,000 budgets).

Addresses are packed from the ticks at which a weight is present. A packing may need more than the bytes alive at its
worst tick: then the choice is made again with that much less, and with twice as much less each further time; the last
resort is the plan with every gap evicted. Updates and saved tensors are left out: a weight that the CPU updates crosses
the link once per iteration whatever is decided here. ``step_cost.py`` evaluates the whole layout with all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import TypeAlias

from deepstow.strategies.core.facts import Facts, Rates
from deepstow.strategies.core.layout import Layout, Range, aligned, ticks_of, uses
from deepstow.strategies.core.on_disk import read_bytes
from deepstow.strategies.planner.addresses import Piece, pack
from deepstow.strategies.planner.problem import Eviction, Gap, Problem, at_need, least_memory, need_order, present_ticks
from deepstow.strategies.planner.simulate import SAME, reload_period
from deepstow.strategies.planner.step_cost import problem_of

PLANS = 6  # pairs that are evaluated at most, each in O(ticks + gaps)
SPARE = 2  # boundaries beyond those that have to be free, so that reloads have room to come early
Alone: TypeAlias = tuple[Problem, list[list[int]]]
ATTEMPTS = 6  # smaller budgets that are tried when a plan cannot be packed
WINDOW = 2  # ticks that forced offloading (``weights: streamed``) fetches ahead by default

# Rates for machines whose own are unknown: they order the choices and are never shown. An H100 over PCIe 5.
ASSUMED = Rates(
    gemm_fp32_flops_per_s=5e13,
    gemm_bf16_flops_per_s=6e14,
    up_bytes_per_s=5e10,
    down_bytes_per_s=5e10,
    duplex_factor=0.8,
    link_latency_s=1e-5,
    dram_bytes_per_s=3e11,
    update_fp32_params_per_s=5e9,
    update_bf16_params_per_s=5e9,
    device_bytes_per_s=3e12,
    origin="assumed",
)


class DoesNotFit(Exception):
    """No plan is within the budget; the message says how many bytes are missing."""


def fitted(layout: Layout, weights: Alone, room: int, ahead: int | None) -> Layout:
    """``layout`` with as many of ``weights`` offloaded as it takes for all of them to fit ``room``.

    Args:
        weights: as from ``alone``.
        ahead: weights come at most so many ticks before their use; None: as early as there is room.

    Raises:
        DoesNotFit: no plan fits.
    """
    problem, groups = weights
    if sum(weight.num_bytes for weight in problem.weights) <= room:
        return layout
    budget, excess = room, 0
    for attempt in range(ATTEMPTS + 1):
        try:
            plan = choose(replace(problem, budget=budget)) if attempt < ATTEMPTS else at_need(problem.gaps)
        except DoesNotFit:
            plan = at_need(problem.gaps)
        ranges = [resident_ticks(ticks, layout.num_ticks) for ticks in present_ticks(problem, _capped(plan, ahead))]
        excess = _num_bytes(problem, ranges) - room
        if excess <= 0:
            buckets = list(layout.buckets)
            for group, ticks in zip(groups, ranges, strict=True):
                for index in group if ticks else ():
                    buckets[index] = replace(buckets[index], resident_ticks=ticks)
            return replace(layout, buckets=tuple(buckets))
        budget -= excess << attempt
    raise DoesNotFit(f"the smallest plan needs {excess} bytes more than there are")


def only_while_used(layout: Layout, indices: Collection[int], ahead: int = 0) -> Layout:
    """``layout`` with these weights on the device only from ``ahead`` ticks before each use to its end."""
    ticks = ticks_of(layout.units)
    count = layout.num_ticks
    buckets = list(layout.buckets)
    for index in indices:
        present = {(tick - early) % count for tick in uses(buckets[index], ticks) for early in range(ahead + 1)}
        buckets[index] = replace(buckets[index], resident_ticks=resident_ticks(present, count))
    return replace(layout, buckets=tuple(buckets))


def resident_ticks(present: Collection[int], count: int) -> tuple[Range, ...]:
    """``present`` as ``Bucket.resident_ticks``: half-open ranges, ascending; empty if it is all of ``count`` ticks."""
    starts = [tick for tick in sorted(present) if tick - 1 not in present]
    ends = [tick + 1 for tick in sorted(present) if tick + 1 not in present]
    return () if len(present) == count else tuple(zip(starts, ends, strict=True))


@lru_cache(maxsize=1024)  # a search asks for many placements whose weights are the same
def choose(problem: Problem) -> tuple[Eviction, ...]:
    """The plan with the least period of the pairs, then with the fewest bytes that move.

    Raises:
        DoesNotFit: no plan is within the budget.
    """
    least = least_memory(problem, problem.gaps)
    worst = max(range(len(least)), key=least.__getitem__)
    if least[worst] > problem.budget:
        missing = least[worst] - problem.budget
        raise DoesNotFit(f"{problem.ticks[worst].name} needs {missing} bytes more than there are")
    best: tuple[Eviction, ...] | None = None
    best_period, best_bytes = inf, 0
    for bound, gaps in sorted(_pairs(problem), key=lambda pair: (pair[0], len(pair[1])))[:PLANS]:
        if bound > best_period * (1 + SAME):
            break
        if (evictions := issue(problem, gaps)) is None:
            continue
        period = reload_period(problem, evictions)
        num_bytes = sum(problem.weights[gap.weight].num_bytes for gap in gaps)
        as_fast = period <= best_period * (1 + SAME)
        if period < best_period * (1 - SAME) or (as_fast and num_bytes < best_bytes):
            best = evictions
            best_period = period
            best_bytes = num_bytes
    return at_need(problem.gaps) if best is None else best


def _pairs(problem: Problem) -> Iterator[tuple[float, list[Gap]]]:
    """So many turns with the fewest boundaries that leave enough room, and with a few more: a lower bound on their
    period, and the gaps. Embedding and head may be much larger than blocks, so also without the boundary that is first
    to leave, the head's, and with the largest ones first.
    """
    count, rank = len(problem.ticks), problem.rank
    turns = sorted((gap for gap in problem.gaps if gap.before < count), key=lambda gap: (gap.after, rank[gap.weight]))
    boundaries = sorted(
        (gap for gap in problem.gaps if gap.before >= count), key=lambda gap: (-gap.before, rank[gap.weight])
    )
    up = [problem.seconds_of(weight, weight.shards * weight.link_bytes) for weight in problem.weights]

    by_size = sorted(boundaries, key=lambda gap: -problem.weights[gap.weight].num_bytes)
    for ends in (boundaries, boundaries[1:], by_size):
        used = least_memory(problem, ends)
        fewest = len(ends)
        seconds = [list(accumulate((up[gap.weight] for gap in gaps), initial=0.0)) for gaps in (turns, ends)]
        for number in range(len(turns) + 1):
            if number:
                _change(problem, used, turns[number - 1], -1)
            while fewest >= 0 and max(used) <= problem.budget:  # it fits: try with one boundary less
                fewest -= 1
                if fewest >= 0:
                    _change(problem, used, ends[fewest], 1)
            for num_ends in range(fewest + 1, min(fewest + 1 + SPARE, len(ends)) + 1):
                bound = max(problem.compute_seconds, seconds[0][number] + seconds[1][num_ends])
                yield bound, [*turns[:number], *ends[:num_ends]]


def _change(problem: Problem, used: list[int], gap: Gap, sign: int) -> None:
    """Add the bytes of the weight of ``gap`` at the ticks of the gap, or take them away."""
    size, count = sign * problem.weights[gap.weight].num_bytes, len(used)
    for start, end in ((gap.after + 1, min(gap.before, count)), (0, gap.before - count)):
        if start < end:
            used[start:end] = [num_bytes + size for num_bytes in used[start:end]]


def issue(problem: Problem, gaps: Iterable[Gap]) -> tuple[Eviction, ...] | None:
    """Reloads as early as memory allows, in order of need; None if evicting in ``gaps`` is not enough."""
    count, budget = len(problem.ticks), problem.budget
    middle = count // 2
    in_order = need_order(problem, gaps)
    start = next((i for i, gap in enumerate(in_order) if gap.before % count >= middle), 0)
    order = in_order[start:] + in_order[:start]
    least = least_memory(problem, order)
    if max(least) > budget:
        return None
    earliest = first = -2 * count
    for _ in range(2):
        # From the middle on; ticks before it are negative, as they are counted from the end. No gap is longer than all.
        used = least[middle:] + least[:middle]
        last = earliest
        evictions = list[Eviction]()
        for gap in order:
            need = (gap.before - middle) % count
            bound = max(last, need - (gap.before - gap.after) + 1)
            size, at = problem.weights[gap.weight].num_bytes, need
            room = budget - size
            while at > bound and used[at - 1] <= room:
                at -= 1
                used[at] += size
            first, last = (first if evictions else at), at
            evictions.append(Eviction(gap, gap.before - need + at))
        earliest = last - count
        if earliest <= first:
            break  # it bounds no reload
    return tuple(evictions)


def alone(facts: Facts, layout: Layout, indices: Collection[int]) -> Alone:
    """The search's problem of the weights of the buckets ``indices``, without updates, and the buckets that each of its
    weights stands for: those with the same units.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    for index in sorted(indices):
        together.setdefault(layout.buckets[index].units, []).append(index)
    groups = list(together.values())
    few = replace(layout, buckets=tuple(layout.buckets[group[0]] for group in groups), accumulation=1)
    problem = problem_of(facts, few, facts.machine.rates or ASSUMED, updates=False)
    sizes = [sum(aligned(layout.buckets[index].weight_bytes) for index in group) for group in groups]
    disk = [sum(read_bytes(layout.buckets[index]) for index in group) for group in groups]
    copies = [
        sum(layout.buckets[index].copy_bytes for index in group) if layout.buckets[group[0]].frozen_as else None
        for group in groups
    ]
    weights = tuple(
        replace(weight, num_bytes=size, disk_bytes=read, copy_bytes=copied)
        for weight, size, read, copied in zip(problem.weights, sizes, disk, copies, strict=True)
    )
    return replace(problem, weights=weights), groups


def _capped(evictions: Sequence[Eviction], ahead: int | None) -> tuple[Eviction, ...]:
    """No reload earlier than ``ahead`` ticks before its use; coming later than planned never needs more memory."""
    if ahead is None:
        return tuple(evictions)
    return tuple(Eviction(gap, max(issue, gap.before - ahead)) for gap, issue in evictions)


def _num_bytes(problem: Problem, there: Sequence[tuple[Range, ...]]) -> int:
    """Device bytes of the weights, which are all that may be offloaded: resident, or packed."""
    pairs = [(weight.num_bytes, ticks) for weight, ticks in zip(problem.weights, there, strict=True)]
    packing = pack(tuple([Piece(size, ticks) for size, ticks in pairs if ticks]))
    return sum(size for size, ticks in pairs if not ticks) + packing.arena
