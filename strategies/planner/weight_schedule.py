"""Which weights travel, and when: the greedy search (``greedy.py``) on a layout's buckets, its answer written as stays.

The layout's movable buckets are the items of a problem whose budget is the ``room`` that all of their weights have
together. What the search never evicts is resident; the rest gets the stays of its plan, and addresses are packed from
them. Activations are no part of it: the arena is taken at the start and never shrinks, so every step has the same room.

A packing may need more than the bytes alive at its worst step. Then the search is asked again with that much less,
until what it finds can be packed; last of all comes the plan that has everything away whenever it can be.

Updates are left out of the search: a weight that the CPU updates crosses the link once per iteration whatever is
decided here. So is what forward saves on the host. The layout as a whole is priced with all of them (``step_cost.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from strategies.core.facts import Facts, Home, Rates
from strategies.core.layout import Bucket, Layout, Range, Spot, aligned, ticks_of, uses
from strategies.planner import greedy
from strategies.planner.addresses import packed, travelling
from strategies.planner.greedy import DoesNotFit
from strategies.planner.problem import Eviction, Problem, Weight, at_need, stays
from strategies.planner.step_cost import problem_of

ATTEMPTS = 6  # smaller budgets that are tried when a plan cannot be packed
SEARCHED = 150  # plans that one search prices at most; more found nothing better for a 7 B model
WINDOW = 2  # steps ahead that weights come which are told to travel, where nothing else is asked for

# Where nobody knows the machine: times that order the choices, and are shown to nobody. An H100 over PCIe 5.
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


def fitted(facts: Facts, layout: Layout, movable: Collection[int], room: int, ahead: int | None) -> Layout:
    """``layout`` with as many weights of ``movable`` buckets travelling as it takes for all of them to fit in ``room``.

    Args:
        ahead: weights come at most so many steps before their use; None: as early as there is room.

    Raises:
        DoesNotFit: no plan does; ``deficit`` is what the smallest lacks.
    """
    problem, order = _problem(facts, layout, movable, room)
    if sum(item.num_bytes for item in problem.items) <= room:
        return layout
    budget = room
    for _ in range(ATTEMPTS):
        try:
            found = greedy.choose(replace(problem, budget=budget), SEARCHED).evictions
        except DoesNotFit:
            break
        made = _with_stays(layout, order, problem, _capped(found, ahead))
        excess = _num_bytes(made, order) - room
        if excess <= 0:
            return _staying_where_unwanted(made)
        budget -= excess
    made = _with_stays(layout, order, problem, at_need(problem.gaps))
    excess = _num_bytes(made, order) - room
    if excess > 0:
        raise DoesNotFit("the smallest plan", excess)
    return made


def _staying_where_unwanted(layout: Layout, *, at_home: bool = True) -> Layout:
    """``layout`` without leaving that makes room for nobody: while a weight is away, somebody else is in its place.

    Args:
        at_home: those whose place nobody ever wants may become residents.
    """
    moving, count = travelling(layout), layout.num_ticks
    packing = packed(moving)
    spots = [Spot(Home.DEVICE, at, b.weight_bytes) for at, b in zip(packing.offsets, moving, strict=True)]
    here = [{step for start, end in b.resident_ticks for step in range(start, end)} for b in moving]
    for index, spot in enumerate(spots):
        overlapping = [other for other, its in enumerate(spots) if other != index and spot.overlaps(its)]
        wanted = {step for other in overlapping for step in here[other]}
        kept = here[index] | {step for gap in _gaps(here[index], count) if not wanted & gap for step in gap}
        here[index] = kept if at_home or len(kept) < count else here[index]
    stays_of = {b.name: ranges(steps, count) for b, steps in zip(moving, here, strict=True)}
    made = replace(
        layout,
        buckets=tuple(replace(b, resident_ticks=stays_of[b.name]) if b.name in stays_of else b for b in layout.buckets),
    )
    resident = sum(aligned(b.weight_bytes) for b in made.buckets if b.resident and b.name in stays_of)
    return made if resident + packed(travelling(made)).arena <= packing.arena else layout


def _gaps(here: Collection[int], count: int) -> Iterator[set[int]]:
    """The runs of steps on which a weight is away; one that goes on over the end of an iteration is one run."""
    run: set[int] = set()
    first = min(here)
    for step in range(first, first + count):
        if step % count not in here:
            run.add(step % count)
        elif run:
            yield run
            run = set()
    if run:
        yield run


def least(facts: Facts, layout: Layout, movable: Collection[int]) -> int:
    """Bytes of the weights of ``movable`` buckets, with everything away whenever it can be."""
    problem, order = _problem(facts, layout, movable, 0)
    return _num_bytes(_with_stays(layout, order, problem, at_need(problem.gaps)), order)


def window(layout: Layout, chosen: Collection[int], ahead: int | None = None) -> Layout:
    """``layout`` with the weights of ``chosen`` buckets coming ``ahead`` steps before use and leaving after it.

    They stay where nobody else wants their place meanwhile.
    """
    ahead = WINDOW if ahead is None else ahead
    steps, count = ticks_of(layout.units), layout.num_ticks
    buckets = list(layout.buckets)
    for index in chosen:
        present = {(step - early) % count for step in uses(buckets[index], steps) for early in range(ahead + 1)}
        buckets[index] = replace(buckets[index], resident_ticks=ranges(present, count))
    return _staying_where_unwanted(replace(layout, buckets=tuple(buckets)), at_home=False)


def ranges(present: Collection[int], count: int) -> tuple[Range, ...]:
    """``present`` of ``count`` steps as stays; none, where that is all of them."""
    if len(present) == count:
        return ()
    starts = [step for step in range(count) if step in present and step - 1 not in present]
    ends = [step + 1 for step in range(count) if step in present and step + 1 not in present]
    return tuple(zip(starts, ends, strict=True))


def _problem(facts: Facts, layout: Layout, movable: Collection[int], room: int) -> tuple[Problem, list[list[int]]]:
    """The search's problem, and which buckets each of its items is: those that the same units use go together."""
    together: dict[tuple[str, ...], list[int]] = {}
    for index in sorted(movable):
        together.setdefault(layout.buckets[index].units, []).append(index)
    order = list(together.values())
    whole = problem_of(facts, layout, facts.machine.rates or ASSUMED)
    items = tuple(_as_one([whole.items[i] for i in some], [layout.buckets[i] for i in some]) for some in order)
    steps = tuple(replace(step, hosted_bytes=0) for step in whole.steps)
    return replace(whole, steps=steps, items=items, budget=room, accumulation=1), order


def _as_one(items: Sequence[Weight], buckets: Sequence[Bucket]) -> Weight:
    return replace(items[0], num_bytes=sum(aligned(bucket.weight_bytes) for bucket in buckets), update=None)


def _capped(evictions: Sequence[Eviction], ahead: int | None) -> tuple[Eviction, ...]:
    """Nothing comes earlier than ``ahead`` steps before its use; later than planned is within memory, too."""
    if ahead is None:
        return tuple(evictions)
    return tuple(replace(eviction, issue=max(eviction.issue, eviction.gap.before - ahead)) for eviction in evictions)


def _with_stays(
    layout: Layout, order: Sequence[Sequence[int]], problem: Problem, evictions: Sequence[Eviction]
) -> Layout:
    buckets = list(layout.buckets)
    always = ((0, layout.num_ticks),)  # also of what would come back as soon as it leaves
    for item, here in enumerate(stays(problem, evictions)):
        for index in order[item]:
            buckets[index] = replace(buckets[index], resident_ticks=() if here == always else here)
    return replace(layout, buckets=tuple(buckets))


def _num_bytes(layout: Layout, order: Sequence[Sequence[int]]) -> int:
    """Bytes of the weights of these buckets on the device, those that stay and those that share."""
    mine = [layout.buckets[index] for some in order for index in some]
    resident = sum(aligned(bucket.weight_bytes) for bucket in mine if bucket.resident)
    return resident + packed([bucket for bucket in mine if not bucket.resident]).arena
