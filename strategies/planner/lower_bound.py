"""Seconds that no plan of some buckets within a budget takes less than, by the simulator: a linear program.

A step is at least as long as each resource needs for it: compute, either direction of the link, the CPU, the host's
memory. Where updates wait for the norm, all of them lie between backward and the last unit's forward, and so do new
weights. So do visits of state in any case, up and down, but for what slots hold. The rest of compute comes after.

Each bucket may be divided between its places at will, with its weight there or away when backward begins, as long as
all fit; weights that are away come up again in each pass. Any prices of resources and of memory give a bound: with
these, each bucket takes the cheapest place. The simplex method finds the best prices. Left out: the order of copies,
latencies, exchanges of ranks, most of the slots' memory, and that of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import mul
from typing import NamedTuple

from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.layout import Site, ticks_of
from deepstow.strategies.planner.estimate import Estimate
from deepstow.strategies.planner.places import OffloadRequest, Place, Places
from deepstow.strategies.planner.step_cost import unit_seconds

VISIT_SLOTS = 2  # of a size
MOST_STEPS = 200  # of the simplex method; fewer give a lower bound, too
TINY = 1e-12


class Choice(NamedTuple):
    """One place of a bucket: bytes of the device, and what it adds to the seconds of each resource."""

    num_bytes: float
    seconds: tuple[float, ...]


def lower_bound(buckets: Sequence[tuple[float, Sequence[Choice]]], fixed: Sequence[float], room: int) -> float:
    """The largest bound of all prices.

    Args:
        buckets: how many are alike, and their choices.
        fixed: seconds of each resource whatever is chosen.
        room: bytes of the device for all buckets.
    """
    prices, memory = _prices(buckets, fixed, room)
    cheapest = (
        count * min(sum(map(mul, prices, one.seconds)) + memory * one.num_bytes / room for one in choices)
        for count, choices in buckets
    )
    return max(*fixed, float(sum(map(mul, prices, fixed)) - memory + sum(cheapest)))


def _prices(
    buckets: Sequence[tuple[float, Sequence[Choice]]], fixed: Sequence[float], room: int
) -> tuple[list[float], float]:
    """Prices of the resources, whose sum is 1, and of all memory: by the simplex method, from all buckets where they
    take the least memory. Columns: the seconds of the step, how much of a bucket is where, what is left of each
    resource, and of memory. The last row is the objective, the last column the right side.
    """
    flat = [(group, count, one) for group, (count, choices) in enumerate(buckets) for one in choices]
    slacks, width = len(fixed) + 1, 1 + len(flat) + len(fixed) + 1
    rows = []
    for number, most in enumerate([*(-each for each in fixed), 1.0]):
        used = [n * (one.num_bytes / room if number == len(fixed) else one.seconds[number]) for _, n, one in flat]
        step = 0.0 if number == len(fixed) else -1.0
        rows.append([step, *used, *(float(slack == number) for slack in range(slacks)), most])
    rows += [[0.0, *(float(of == group) for of, *_ in flat), *[0.0] * slacks, 1.0] for group in range(len(buckets))]
    rows.append([1.0, *[0.0] * (width - 1), 0.0])
    for group in range(len(buckets)):
        own = [column for column, (of, *_) in enumerate(flat, start=1) if of == group]
        _pivot(rows, slacks + group, min(own, key=lambda column: flat[column - 1][2].num_bytes))
    _pivot(rows, min(range(len(fixed)), key=lambda number: rows[number][-1]), 0)
    for _ in range(MOST_STEPS):
        column = min(range(width), key=rows[-1].__getitem__)
        leaves = [(row[-1] / row[column], at) for at, row in enumerate(rows[:-1]) if row[column] > TINY]
        if rows[-1][column] >= -TINY or not leaves:
            break
        _pivot(rows, min(leaves)[1], column)
    *prices, memory = (max(0.0, price) for price in rows[-1][1 + len(flat) : width])
    return [price / sum(prices) for price in prices], memory / sum(prices)


def _pivot(rows: list[list[float]], at: int, column: int) -> None:
    """Make ``column`` that of the unit vector of the row ``at``."""
    own = rows[at] = [each / rows[at][column] for each in rows[at]]
    for number, row in enumerate(rows):
        if number != at and (factor := row[column]):
            rows[number] = [each - factor * mine for each, mine in zip(row, own, strict=True)]


def bound_of(facts: Facts, request: OffloadRequest, places: Places, estimate: Estimate, room: int) -> float:
    """``lower_bound`` of all placements of ``places`` whose arena on the device takes at most ``room``."""
    rates, run = facts.machine.rates, facts.run
    assert rates is not None
    up, down, dram, passes = rates.up_bytes_per_s, rates.down_bytes_per_s, rates.dram_bytes_per_s, run.accumulation
    times, hosted = unit_seconds(facts, rates), passes * sum(unit.hosted_bytes for unit in facts.units)
    compute, both = passes * sum(map(sum, times)), max(1.0, 2 * rates.duplex_factor)
    rest = compute - sum(forward for forward, _ in times[:-1])
    fixed = [compute, hosted / up, hosted / down, 0.0, 2 * hosted / dram, rest, rest, rest, rest]
    turn = ticks_of([unit.name for unit in facts.units])[facts.units[-1].name][1]

    def choice(index: int, at: Place, *, away: bool) -> Choice:
        load, bucket = estimate.load(index, at), places.buckets[index]
        size, whole = bucket.copy_bytes // bucket.shards, bucket.weight_bytes
        new = load.new
        again = passes * size if away and max(places.ticks[index]) > turn else 0
        back = size if away and at.site is Site.STREAMED else 0
        visiting = load.state + load.visiting_grads
        rising, falling = new + visiting + again, load.state + load.grads * (not at.grad_direct) + back
        waits = not request.in_backward
        found = [load.kernel_s, rising / up, falling / down, load.cpu_s, (load.touched + rising + falling) / dram]
        cpu_s, touched = (load.cpu_s, load.touched) if waits else (0.0, 0.0)
        coming, going = visiting + new * waits, load.state
        found += [coming / up, cpu_s, (touched + coming + going) / dram, (coming / up + going / down) / both]
        return Choice(places.device_bytes(index, at, away=away) / whole, tuple(one / whole for one in found))

    def choices(index: int) -> Iterator[tuple[tuple[Place, bool, bool], Choice]]:
        for at in places.choices[index]:
            yield (at, False, False), choice(index, at, away=False)
            if places.may_leave(index, at) and turn not in places.ticks[index]:
                yield (at, True, max(places.ticks[index]) > turn), choice(index, at, away=True)

    # Per byte of weights; of buckets with the same choices, each with the least that one of them takes.
    groups: dict[tuple[object, ...], tuple[float, list[Choice]]] = {}
    for index, bucket in enumerate(places.buckets):
        kinds, found = zip(*choices(index), strict=True)
        number, least = groups.get(kinds, (0.0, list(found)))
        least = [
            Choice(min(a.num_bytes, b.num_bytes), tuple(map(min, a.seconds, b.seconds)))
            for a, b in zip(least, found, strict=True)
        ]
        groups[kinds] = number + bucket.weight_bytes, least
    # What slots hold of visits when the norm becomes known, or at the end of forward, takes memory instead of time.
    states = {bucket.state_bytes(run.moments) for bucket in places.buckets}
    early = 0.0 if not request.in_backward else 2.0
    saves = (early / up, 0.0, (early + 1) / dram, (early / up + 1 / down) / both)
    holds = [Choice(0.0, (0.0,) * len(fixed)), Choice(1.0, (*[0.0] * 5, *(-each for each in saves)))]
    return lower_bound([*groups.values(), (VISIT_SLOTS * sum(states), holds)], fixed, room)
