"""Which weights are offloaded, and when they come back.

    even    turns of the first blocks with boundaries of the last ones: two integers. Pairs come in order of a lower
            bound (compute, or the time of their copies), and a few are compared by the simulated period
    issue   in order of need, each reload as early as memory allows, none before the one needed earlier

Of blocks that are alike this is the best plan. Of others it is the best of these pairs; a search over single gaps does
not make whole steps faster (benchmarks/records/2026-11-28_schedules_2-core).

``issue`` looks at an iteration from the middle, where backward begins, and twice: the first pass finds how late the
last reload is issued, which bounds the first one of the next iteration. In 600 small instances this was the best of all
issue vectors, and more memory never made it slower for the same gaps (40,000 budgets); other cut points do not have
this. More memory may make the gaps that are found slower; ``placement_search.py`` compares whole layouts.

What never leaves is resident; the rest gets the ticks at which it is present, and addresses are packed from these. A
packing may need more than the bytes alive at its worst tick. Then the choice is made again with that much less, and
with twice as much less each further time, since a budget a little smaller often has the same result; the last resort is
the plan with every gap evicted. Activations are not part of it: the arena is allocated at the start and never shrinks,
so every tick has the same room.

Updates and saved tensors are left out: a weight that the CPU updates crosses the link once per iteration whatever is
decided here. ``step_cost.py`` evaluates the whole layout with all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import merge
from itertools import accumulate
from math import inf

from strategies.core.facts import Facts, Rates
from strategies.core.layout import Layout, Range, aligned, ticks_of, uses
from strategies.planner.addresses import packed
from strategies.planner.packing import Piece
from strategies.planner.problem import Eviction, Gap, Problem, at_need, least_memory, need_order, present_ticks
from strategies.planner.simulate import SAME, reload_period
from strategies.planner.step_cost import problem_of

SEARCHED = 4  # plans that are compared at most, each in O(ticks + gaps)
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


def fitted(facts: Facts, layout: Layout, indices: Collection[int], room: int, ahead: int | None) -> Layout:
    """``layout`` with as many weights of the buckets ``indices`` offloaded as it takes for all of them to fit ``room``.

    Args:
        ahead: weights come at most so many ticks before their use; None: as early as there is room.

    Raises:
        DoesNotFit: no plan fits.
    """
    if sum(aligned(layout.buckets[index].weight_bytes) for index in indices) <= room:
        return layout
    problem, groups = _problem(facts, layout, indices, room)
    budget, excess = room, 0
    for attempt in range(ATTEMPTS + 1):
        try:
            found = choose(replace(problem, budget=budget)) if attempt < ATTEMPTS else at_need(problem.gaps)
        except DoesNotFit:
            found = at_need(problem.gaps)
        there = [resident_ticks(one, layout.num_ticks) for one in present_ticks(problem, _capped(found, ahead))]
        excess = _num_bytes(problem, there) - room
        if excess <= 0:
            buckets = list(layout.buckets)
            for group, ticks in zip(groups, there, strict=True):
                for index in group if ticks else ():
                    buckets[index] = replace(buckets[index], resident_ticks=ticks)
            return replace(layout, buckets=tuple(buckets))
        budget -= excess << attempt
    raise DoesNotFit(f"the smallest plan needs {excess} bytes more than there are")


def only_while_used(layout: Layout, indices: Collection[int], ahead: int = 0) -> Layout:
    """``layout`` with these weights on the device only from ``ahead`` ticks before each use to its end."""
    ticks, count, buckets = ticks_of(layout.units), layout.num_ticks, list(layout.buckets)
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
    """The best of ``SEARCHED`` plans: the one with the least period, then with the fewest bytes that move.

    Raises:
        DoesNotFit: no plan is within the budget.
    """
    least = least_memory(problem, problem.gaps)
    worst = max(range(len(least)), key=least.__getitem__)
    if least[worst] > problem.budget:
        missing = least[worst] - problem.budget
        raise DoesNotFit(f"{problem.ticks[worst].name} needs {missing} bytes more than there are")
    found, period, moved = tuple[Eviction, ...](), inf, 0
    for tried, (bound, gaps) in enumerate(_even(problem)):
        # Nothing is faster than compute that waits for nothing.
        if tried == SEARCHED or bound >= period or period <= problem.compute_seconds * (1 + SAME):
            break
        evictions = issue(problem, gaps)
        assert evictions is not None, "these fit"
        seconds, size = reload_period(problem, evictions), sum(problem.weights[gap.weight].num_bytes for gap in gaps)
        if seconds < period * (1 - SAME) or (seconds <= period * (1 + SAME) and size < moved):
            found, period, moved = evictions, seconds, size
    return found


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
    earliest = -2 * count
    for _ in range(2):
        # From the middle on; ticks before it are negative, as they are counted from the end. No gap is longer than all.
        used, last, found = least[middle:] + least[:middle], earliest, []
        for gap in order:
            need = (gap.before - middle) % count
            bound = max(last, need - (gap.before - gap.after) + 1)
            size, at = problem.weights[gap.weight].num_bytes, need
            room = budget - size
            while at > bound and used[at - 1] <= room:
                at -= 1
                used[at] += size
            found.append(Eviction(gap, gap.before - need + at))
            last = at
        earliest = last - count
    return tuple(found)


def _problem(facts: Facts, layout: Layout, indices: Collection[int], room: int) -> tuple[Problem, list[list[int]]]:
    """The search's problem, and the buckets that each of its weights stands for: those with the same units."""
    together: dict[tuple[str, ...], list[int]] = {}
    for index in sorted(indices):
        together.setdefault(layout.buckets[index].units, []).append(index)
    groups = list(together.values())
    few = replace(layout, buckets=tuple(layout.buckets[group[0]] for group in groups), accumulation=1)
    whole = problem_of(facts, few, facts.machine.rates or ASSUMED, updates=False)
    sizes = [sum(aligned(layout.buckets[index].weight_bytes) for index in group) for group in groups]
    weights = tuple(replace(one, num_bytes=size) for one, size in zip(whole.weights, sizes, strict=True))
    return replace(whole, weights=weights, budget=room), groups


def _capped(evictions: Sequence[Eviction], ahead: int | None) -> tuple[Eviction, ...]:
    """No reload earlier than ``ahead`` ticks before its use; coming later than planned never needs more memory."""
    if ahead is None:
        return tuple(evictions)
    return tuple(Eviction(gap, max(issue, gap.before - ahead)) for gap, issue in evictions)


def _num_bytes(problem: Problem, there: Sequence[tuple[Range, ...]]) -> int:
    """Device bytes of the weights, which are all that may be offloaded: resident, or packed."""
    pairs = [(weight.num_bytes, ticks) for weight, ticks in zip(problem.weights, there, strict=True)]
    packing = packed(tuple([Piece(size, ticks) for size, ticks in pairs if ticks]))
    return sum(size for size, ticks in pairs if not ticks) + packing.arena


def _even(problem: Problem) -> Iterator[tuple[float, list[Gap]]]:
    """Turns of the first blocks with boundaries of the last ones, as many as fit, by a lower bound on the period. There
    are as many as the square of the blocks, so one is made when it is its turn.
    """
    count, rank, gaps = len(problem.ticks), problem.rank, problem.gaps
    turns = sorted((gap for gap in gaps if gap.before < count), key=lambda gap: (gap.after, rank[gap.weight]))
    ends = sorted((gap for gap in gaps if gap.before >= count), key=lambda gap: (-gap.before, rank[gap.weight]))
    up = [problem.up_seconds(weight.num_bytes) for weight in problem.weights]
    copies = [list(accumulate((up[gap.weight] for gap in some), initial=0.0)) for some in (turns, ends)]

    def rising(number: int, least: int) -> Iterator[tuple[float, int, int, int]]:
        for more in range(least, len(ends) + 1):
            bound = max(problem.compute_seconds, copies[0][number] + copies[1][more]) * (1 - SAME)
            yield bound, number + more, number, more

    def add(gap: Gap, sign: int) -> None:
        """Add the bytes of a weight, or take them away, at the ticks of its gap."""
        size = sign * problem.weights[gap.weight].num_bytes
        for tick in range(gap.after + 1, gap.before):
            used[tick % count] += size

    least, used, some = len(ends), least_memory(problem, ends), list[Iterator[tuple[float, int, int, int]]]()
    for number in range(len(turns) + 1):
        if number:
            add(turns[number - 1], -1)
        while least >= 0 and max(used) <= problem.budget:
            least -= 1  # it fits; try with one boundary less
            if least >= 0:
                add(ends[least], 1)
        some.append(rising(number, least + 1))
    for bound, _, number, more in merge(*some):
        yield bound, [*turns[:number], *ends[:more]]
