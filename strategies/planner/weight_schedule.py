"""Which weights are offloaded, and when they come back: the search of ``greedy.py`` applied to a layout's buckets.

The layout's offloadable buckets are the weights of a problem whose budget is the ``room`` that they share. What the
search never evicts is resident; the rest gets the ticks at which the plan has it present, and addresses are packed from
these. Activations are not part of it: the arena is allocated at the start and never shrinks, so every tick has the same
room.

A packing may need more than the bytes alive at its worst tick. The search then runs again with that much less, and with
twice as much less each further time, since a budget a little smaller often has the same result; the last resort is the
plan with every gap evicted.

Updates are left out of the search: a weight that the CPU updates crosses the link once per iteration whatever is
decided here. So are saved tensors on the host. ``step_cost.py`` evaluates the whole layout with all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from strategies.core.facts import Facts, Rates
from strategies.core.layout import Layout, Range, aligned, ticks_of, uses
from strategies.planner import greedy
from strategies.planner.addresses import weight_packing
from strategies.planner.greedy import DoesNotFit
from strategies.planner.problem import Eviction, Problem, at_need, present_ticks
from strategies.planner.step_cost import problem_of

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
Groups = Sequence[Sequence[int]]  # per weight of the problem: the buckets that it stands for


def fitted(
    facts: Facts,
    layout: Layout,
    indices: Collection[int],
    room: int,
    ahead: int | None,
    searched: int = greedy.SEARCHED,
) -> Layout:
    """``layout`` with as many weights of the buckets ``indices`` offloaded as it takes for all of them to fit ``room``.

    Args:
        ahead: weights come at most so many ticks before their use; None: as early as there is room.
        searched: plans among which the search takes the best one.

    Raises:
        DoesNotFit: no plan fits.
    """
    if sum(aligned(layout.buckets[index].weight_bytes) for index in indices) <= room:
        return layout
    problem, groups = _problem(facts, layout, indices, room)
    budget = room
    for attempt in range(ATTEMPTS):
        try:
            found = greedy.choose(replace(problem, budget=budget), searched)
        except DoesNotFit:
            break
        made = _scheduled(layout, groups, problem, _capped(found, ahead))
        excess = _num_bytes(made, indices) - room
        if excess <= 0:
            return made
        budget -= excess << attempt
    made = _scheduled(layout, groups, problem, at_need(problem.gaps))
    excess = _num_bytes(made, indices) - room
    if excess > 0:
        raise DoesNotFit(f"the smallest plan needs {excess} bytes more than there are")
    return made


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


def _problem(facts: Facts, layout: Layout, indices: Collection[int], room: int) -> tuple[Problem, Groups]:
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


def _scheduled(layout: Layout, groups: Groups, problem: Problem, evictions: Sequence[Eviction]) -> Layout:
    buckets = list(layout.buckets)
    for group, present in zip(groups, present_ticks(problem, evictions), strict=True):
        if there := resident_ticks(present, layout.num_ticks):
            for index in group:
                buckets[index] = replace(buckets[index], resident_ticks=there)
    return replace(layout, buckets=tuple(buckets))


def _num_bytes(layout: Layout, indices: Collection[int]) -> int:
    """Device bytes of the weights of these buckets, which are all that may be offloaded: resident, or packed."""
    resident = sum(aligned(layout.buckets[i].weight_bytes) for i in indices if layout.buckets[i].resident)
    return resident + weight_packing(layout).arena
