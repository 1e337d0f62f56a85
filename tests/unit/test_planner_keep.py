"""What to keep, against enumeration of all plans, and by properties."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from deepstow.strategies.core.facts import Operator, Unit, Work
from deepstow.strategies.core.peak import Saved, backward_peak, host_room
from deepstow.strategies.core.plan import INPUT, NONE
from deepstow.strategies.planner.activation_policy import (
    FULL,
    SELECTIVE,
    KeepCosts,
    KeepOption,
    TradeoffCurve,
    _options,
    _with_shared,
    by_policy,
    cheapest,
    frontier,
    keep_all,
    within_host,
)
from tests.helpers.fakes import block, choosing, head


def work_seconds(work: Work) -> float:
    return work.flops / 10 + work.touched_bytes


HERE = KeepCosts(work_seconds)  # nothing goes to the host
INPUTS = KeepCosts(work_seconds, 5.0, inputs_only=True)
HOSTED = {
    "dear link": KeepCosts(work_seconds, 5.0),
    "link": KeepCosts(work_seconds, 0.5),
    "free link": KeepCosts(work_seconds, 0.0),
}
EVERY = pytest.mark.parametrize("costs", [HERE, *HOSTED.values()], ids=["no link", *HOSTED])


def peak(ways: Sequence[KeepOption]) -> int:
    return backward_peak([way.saved for way in ways], [0] * len(ways))


def cost(ways: Sequence[KeepOption], costs: KeepCosts = HERE) -> float:
    return sum(map(costs.of, ways))


def random_block(random: Random, index: int = 0) -> Unit:
    operators = [Operator(f"linear {n}", random.randint(1, 40), Work(flops=random.randint(1, 500))) for n in range(3)]
    saved = 20 + sum(operator.num_bytes for operator in operators) + random.randint(0, 60)
    rest = Work(touched_bytes=random.randint(1, 10))
    size = random.randint(1, 20)
    return choosing(block(index, 8, saved), *operators, input_bytes=size, rest=rest, stream_bytes=size)


def equal_blocks(random: Random, count: int) -> list[Unit]:
    first = random_block(random)
    return [replace(first, name=f"layers.{index}") for index in range(count)]


# --- one block -------------------------------------------------------------------------------------------------------


def test_policies() -> None:
    operators = (
        Operator("linear 0", 100, Work(flops=1000)),
        Operator("scores 0", 300, Work(flops=100)),
        Operator("softmax 0", 300, Work(touched_bytes=600)),
        Operator("attention 0", 50, Work(flops=400)),
    )
    unit = choosing(block(0, 8, 1000), *operators, input_bytes=10, rest=Work(touched_bytes=7))
    assert by_policy(unit, NONE) == keep_all(unit)
    full = by_policy(unit, FULL)
    assert (full.saved_bytes, full.running_bytes, full.kept) == (10, 1010, ())
    assert full.again == Work(flops=1500, touched_bytes=607)
    some = by_policy(unit, SELECTIVE)
    assert (some.saved_bytes, some.kept) == (160, ("linear 0", "attention 0"))
    assert some.again == Work(flops=100, touched_bytes=607)
    unit = choosing(block(0, 8, 100), Operator("linear 0", 95, Work(flops=1)), input_bytes=10)
    assert by_policy(unit, SELECTIVE) == keep_all(unit), "nothing would be freed"
    assert by_policy(block(0, 8, 100), FULL) == keep_all(block(0, 8, 100))


@EVERY
@pytest.mark.parametrize("seed", range(3))
def test_a_frontier_costs_more_per_byte_and_no_option_is_better(seed: int, costs: KeepCosts) -> None:
    unit = random_block(Random(seed))
    options = frontier(unit, costs)
    assert options[0] == keep_all(unit)
    steps = [costs.per_byte(before, after) for before, after in pairwise(options)]
    assert steps == sorted(steps)
    choices = unit.choices
    assert choices is not None
    for where in product((None, "device", "host"), repeat=3):  # every set of operators, not prefixes only
        for input_hosted in (False, True) if costs.link_s is not None else (False,):
            if "host" in where and costs.link_s is None:
                continue
            homes = list(zip(choices.operators, where, strict=True))
            size = choices.input_bytes * (not input_hosted) + sum(op.num_bytes for op, at in homes if at == "device")
            hosted = choices.input_bytes * input_hosted + sum(op.num_bytes for op, at in homes if at == "host")
            again = sum((op.work for op, at in homes if at is None), choices.rest)
            seconds = work_seconds(again) + (costs.link_s or 0.0) * hosted
            for before, after in pairwise(options):  # never under the curve between two options
                if after.saved_bytes <= size <= before.saved_bytes:
                    share = (before.saved_bytes - size) / (before.saved_bytes - after.saved_bytes)
                    curve = costs.of(before) + share * (costs.of(after) - costs.of(before))
                    assert seconds >= curve - 1e-9


# --- all blocks ------------------------------------------------------------------------------------------------------


def all_plans(units: Sequence[Unit], costs: KeepCosts = HERE) -> list[tuple[KeepOption, ...]]:
    """Every way of every block; blocks that are alike may swap, so that only the order matters."""
    last = len(units) - 2
    return list(product(*(_options(unit, costs if index < last else HERE) for index, unit in enumerate(units))))


def ratio(units: list[Unit], random: Random, costs: KeepCosts = HERE) -> float:
    """Cost of ours over that of the best plan, for a budget that both can keep."""
    plans = [(peak(ways), cost(ways, costs)) for ways in all_plans(units, costs)]
    lowest = peak(cheapest(units, costs, peak, 0))
    budget = random.randint(lowest, max(size for size, _ in plans))
    best = min(seconds for size, seconds in plans if size <= budget)
    found = cheapest(units, costs, peak, budget)
    assert peak(found) <= budget
    assert cost(found, costs) >= best - 1e-9
    return cost(found, costs) / best if best else 1.0 + (cost(found, costs) > 0)


@pytest.mark.parametrize(
    ("costs", "mean", "worst"),
    [(HERE, 1.03, 1.35), *((costs, 1.15, 2) for costs in (*HOSTED.values(), INPUTS))],
    ids=["no link", *HOSTED, "inputs"],
)
def test_against_enumeration_of_equal_blocks(costs: KeepCosts, mean: float, worst: float) -> None:
    """What is lost is at most the rounding of one block; these have four, of which two may send."""
    seeds = range(60 if costs is HERE else 10)
    ratios = [ratio(equal_blocks(Random(seed), 4), Random(seed), costs) for seed in seeds]
    assert sum(ratios) / len(ratios) < mean
    assert max(ratios) < worst


def test_against_enumeration_of_blocks_that_differ() -> None:
    ratios = [ratio([random_block(Random(10 * seed + i), i) for i in range(3)], Random(seed)) for seed in range(60)]
    assert sum(ratios) / len(ratios) < 1.15
    assert max(ratios) < 2.5


@pytest.mark.parametrize("seed", range(2))
def test_more_memory_never_costs_time_and_no_budget_is_exceeded(seed: int) -> None:
    units = [*equal_blocks(Random(seed), 6), head(8, 30)]
    lowest = peak(cheapest(units, HERE, peak, 0))
    highest = peak([keep_all(unit) for unit in units])
    costs = []
    for budget in range(lowest, highest + 1, max(1, (highest - lowest) // 15)):
        found = cheapest(units, HERE, peak, budget)
        assert peak(found) <= budget
        costs.append(cost(found))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(costs))
    assert cost(cheapest(units, HERE, peak, highest)) == 0
    curve = TradeoffCurve(units[:-1], HERE)
    for place in range(len(curve.moves) + 1):
        saved = [way.saved_bytes for way in curve.at(place)]
        assert saved == sorted(saved) and len(set(saved)) <= 2, "of alike blocks the first ones have fewer bytes"


def test_masks_that_blocks_share_are_counted_with_the_first_that_keeps_them() -> None:
    """The first block is given them. Plain autograd does not save them; whoever is recomputed keeps them."""
    alike = choosing(block(1, 8, 100), Operator("linear 0", 20, Work(flops=50)), input_bytes=10, stream_bytes=10)
    assert alike.choices is not None
    given = replace(alike.choices, input_bytes=17, running_bytes=alike.choices.running_bytes + 7)
    units = [replace(alike, name="layers.0", choices=given), alike, replace(alike, name="layers.2")]
    full, plain = (by_policy(alike, policy) for policy in (FULL, NONE))
    cases = {(NONE, FULL, FULL): [100, 17, 10], (NONE, NONE, NONE): [100, 100, 100], (NONE, NONE, FULL): [100, 100, 17]}
    for policies, sizes in cases.items():
        ways = [full if policy == FULL else plain for policy in policies]
        assert [way.saved_bytes for way in _with_shared(units, ways)] == sizes
    ways = [by_policy(unit, FULL) for unit in units]
    assert [way.saved_bytes for way in _with_shared(units, ways)] == [17, 10, 10]


# --- on the host -----------------------------------------------------------------------------------------------------


def test_a_policy_with_all_it_keeps_on_the_host() -> None:
    operators = (Operator("linear 0", 100, Work(flops=1000)), Operator("scores 0", 300, Work(flops=100)))
    unit = choosing(block(0, 8, 1000), *operators, input_bytes=15, stream_bytes=10)
    full, some = (by_policy(unit, policy, hosts=True) for policy in (FULL, SELECTIVE))
    assert (full.saved_bytes, full.hosted, full.hosted_bytes) == (5, (INPUT,), 10)  # the mask is everybody's
    assert (some.saved_bytes, some.kept) == (5, ("linear 0",))
    assert (some.hosted, some.hosted_bytes) == ((INPUT, "linear 0"), 110)
    assert some.again == by_policy(unit, SELECTIVE).again


def test_the_peak_has_two_blocks_of_what_travels() -> None:
    """While a block runs again, what it had on the host is there, and that of the block before it arrives."""
    sent = Saved(waiting=1, working=50, hosted=20)
    kept = Saved(waiting=30, working=50)
    assert backward_peak([sent, sent, kept], [0, 0, 0]) == max(1 + 1 + 50 + 20, 1 + 50 + 20, 50)
    assert backward_peak([sent, kept, kept], [0, 0, 0]) == max(1 + 30 + 50, 1 + 50 + 20, 50)
    assert backward_peak([sent, sent], [3, 4]) == max(1 + 50 + 20 + 4, 50 + 3 + 4)


def test_inputs_on_the_host_have_the_lowest_peak_of_all() -> None:
    """So whatever fits in some way fits on that curve."""
    for seed in range(8):
        units = equal_blocks(Random(seed), 4)
        lowest = min(peak(ways) for ways in all_plans(units, HOSTED["free link"]))
        assert peak(cheapest(units, INPUTS, peak, 0)) == lowest


@pytest.mark.parametrize("senders", [0, 1, 3])
def test_as_many_send_as_the_host_holds(senders: int) -> None:
    units = [*equal_blocks(Random(6), 6), head(8, 30)]
    ways = TradeoffCurve(units, HOSTED["free link"]).at(10**6)
    spare = sum(host_room(way.hosted_bytes, len(way.hosted)) for way in ways[:senders])
    for more, expected in ((0, senders), (host_room(10**6, 10), 4)):  # the last two blocks never send
        costs = within_host(units, HOSTED["free link"], spare + more)
        assert [bool(way.hosted) for way in TradeoffCurve(units, costs).at(10**6)] == [i < expected for i in range(7)]
    assert within_host(units, HERE, 0) == HERE
