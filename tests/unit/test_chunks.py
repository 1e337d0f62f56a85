"""How many chunks sub-layers take, and how long that is by a clock of its own."""

import random
from dataclasses import replace

import pytest

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import MachineFacts, UnitTimes
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.overlap import Passes, Table, chunk_seconds, divisors
from tests.helpers.fakes import facts
from tests.unit.test_rates import some_rates

ROWS = 12


def clocked(tables: list[Table], many: int) -> float:
    """By events over single rows: what is free and ready runs, in order."""
    there, compute_free, link_free = [0.0] * ROWS, 0.0, 0.0
    for compute, exchange, after in (table[many] for table in tables):
        summed = list(there)
        for chunk in range(many):
            rows = range(ROWS * chunk // many, ROWS * (chunk + 1) // many)
            compute_free = max(compute_free, *(there[row] for row in rows)) + compute
            link_free = max(link_free, compute_free) + exchange
            for row in rows:
                summed[row] = link_free
            compute_free += after
        there = summed
    return max(*there, compute_free)


def chain(draw: random.Random, length: int) -> list[Table]:
    """Sub-layers whose compute and sums take about as long, each chunk something besides its rows."""
    found = []
    for _ in range(length):
        compute, exchange = draw.uniform(0.5, 2), draw.uniform(0.5, 2)
        more, wait = draw.uniform(0, 0.3), draw.uniform(0, 0.3)
        after = draw.choice([0.0, compute / 2])
        found.append({many: (more + compute / many, wait + exchange / many, after / many) for many in (1, 2, 3, 4)})
    return found


def test_seconds_are_those_of_the_clock() -> None:
    draw = random.Random(0)
    for _ in range(200):
        tables = chain(draw, draw.randint(1, 4))
        for many in tables[0]:
            assert abs(chunk_seconds(tables, many) - clocked(tables, many)) < 1e-12


def test_the_smallest_number_that_is_nearly_the_fastest() -> None:
    draw = random.Random(1)
    for _ in range(30):
        forward = chain(draw, 4)
        passes = Passes(
            forward, [{many: (2 * each[0], *each[1:]) for many, each in table.items()} for table in forward]
        )
        times = passes.seconds()
        least, found = min(times.values()), passes.choose()
        assert times[found] <= 1.02 * least < min((times[many] for many in times if many < found), default=2 * least)
    assert divisors(6) == (1, 2, 3, 6) and divisors(32) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("link", "timed", "said"),
    [
        (1e15, False, "in 1 chunks"),
        (5e8, False, "in 2 chunks"),
        (5e8, True, "in 4 chunks"),
        (None, False, "in 2 chunks"),
    ],
)
def test_auto_is_by_the_rates(link: float | None, timed: bool, said: str) -> None:
    """Sums of no time; of about as much as compute; where halves of the rows were timed to take longer than all; of
    unknown."""
    machine = MachineFacts("test gpu", 1 << 40, 1 << 40)
    if link is not None:
        machine = replace(machine, rates=some_rates(net_bytes_per_s=link, net_latency_s=0.0))
    known = facts(
        machine=machine, world_size=2, tensor=2, micro_batch=8, sequence=64, hidden_size=512, forward_flops=10**11
    )
    if timed:
        times = {each: (each % 4 + 1.0) / each * 2e-3 for each in (1, 2, 4, 8)}
        blocks = UnitTimes((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), "", {each: (2 * t, 4 * t) for each, t in times.items()})
        known = replace(known, unit_times=blocks)
    plan = compose({"tensor": find("tensor")(degree=2, chunks="auto"), "zero": find("zero")(stage=1)}, known)
    (rows,) = (one for one in plan.reserves(Tier.DEVICE) if one.owner == "tensor: rows under way")
    assert said in rows.reason, rows.reason
    assert ("rates are unknown" in rows.reason) == (link is None)
