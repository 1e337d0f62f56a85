"""What to keep, against enumeration of all plans, and by properties."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from strategies.core.facts import Operator, Unit, Work
from strategies.core.plan import NONE, backward_peak
from strategies.planner.keep import FULL, SELECTIVE, Line, Way, _ways, by_policy, cheapest, everything, ladder
from tests.helpers.fakes import block, choosing, head


def pace(work: Work) -> float:
    return work.flops / 10 + work.touched_bytes


def peak(ways: Sequence[Way]) -> int:
    return backward_peak([(way.saved_bytes, way.running_bytes) for way in ways], [0] * len(ways))


def cost(ways: Sequence[Way]) -> float:
    return sum(pace(way.again) for way in ways)


def random_block(random: Random, index: int = 0) -> Unit:
    operators = [Operator(f"linear {n}", random.randint(1, 40), Work(flops=random.randint(1, 500))) for n in range(3)]
    saved = 20 + sum(operator.num_bytes for operator in operators) + random.randint(0, 60)
    rest = Work(touched_bytes=random.randint(1, 10))
    return choosing(block(index, 8, saved), *operators, input_bytes=random.randint(1, 20), rest=rest)


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
    assert by_policy(unit, NONE) == everything(unit)
    full = by_policy(unit, FULL)
    assert (full.saved_bytes, full.running_bytes, full.kept) == (10, 1010, ())
    assert full.again == Work(flops=1500, touched_bytes=607)
    some = by_policy(unit, SELECTIVE)
    assert (some.saved_bytes, some.kept) == (160, ("linear 0", "attention 0"))
    assert some.again == Work(flops=100, touched_bytes=607)


def test_where_nothing_is_freed_everything_is_kept() -> None:
    unit = choosing(block(0, 8, 100), Operator("linear 0", 95, Work(flops=1)), input_bytes=10)
    assert by_policy(unit, SELECTIVE) == everything(unit)
    assert by_policy(block(0, 8, 100), FULL) == everything(block(0, 8, 100))


@pytest.mark.parametrize("seed", range(40))
def test_a_ladder_pays_more_for_every_step_and_no_way_is_better(seed: int) -> None:
    unit = random_block(Random(seed))
    rungs = ladder(unit, pace)
    assert rungs[0] == everything(unit)
    prices = [
        (pace(after.again) - pace(before.again)) / (before.saved_bytes - after.saved_bytes)
        for before, after in pairwise(rungs)
    ]
    assert prices == sorted(prices)
    assert unit.choices is not None
    for kept in product((False, True), repeat=3):  # every set of operators, not prefixes only
        chosen = [op for op, keep in zip(unit.choices.operators, kept, strict=True) if keep]
        size = unit.choices.input_bytes + sum(op.num_bytes for op in chosen)
        seconds = pace(sum((op.work for op in unit.choices.operators if op not in chosen), unit.choices.rest))
        for before, after in pairwise(rungs):  # never under the line between two rungs
            if after.saved_bytes <= size <= before.saved_bytes:
                share = (before.saved_bytes - size) / (before.saved_bytes - after.saved_bytes)
                line = pace(before.again) + share * (pace(after.again) - pace(before.again))
                assert seconds >= line - 1e-9


# --- all blocks ------------------------------------------------------------------------------------------------------


def all_plans(units: Sequence[Unit]) -> list[tuple[Way, ...]]:
    """Every way of every block; blocks that are alike may swap, so that only the order matters."""
    return list(product(*(_ways(unit, pace) for unit in units)))


def ratio(units: list[Unit], random: Random) -> float:
    """Time of ours over that of the best plan, for a budget that both can keep."""
    plans = [(peak(ways), cost(ways)) for ways in all_plans(units)]
    budget = random.randint(min(size for size, _ in plans), max(size for size, _ in plans))
    best = min(seconds for size, seconds in plans if size <= budget)
    found = cheapest(units, pace, peak, budget)
    assert peak(found) <= budget
    assert cost(found) >= best - 1e-9
    return cost(found) / best if best else 1.0 + (cost(found) > 0)


def test_against_enumeration_of_equal_blocks() -> None:
    """What is lost is at most the rounding of one block; these have four."""
    ratios = [ratio(equal_blocks(Random(seed), 4), Random(seed)) for seed in range(60)]
    assert sum(found < 1 + 1e-9 for found in ratios) >= 45
    assert sum(ratios) / len(ratios) < 1.03
    assert max(ratios) < 1.35


def test_against_enumeration_of_blocks_that_differ() -> None:
    ratios = [ratio([random_block(Random(10 * seed + i), i) for i in range(3)], Random(seed)) for seed in range(60)]
    assert sum(ratios) / len(ratios) < 1.15
    assert max(ratios) < 2.5


@pytest.mark.parametrize("seed", range(20))
def test_more_memory_never_costs_time_and_no_budget_is_exceeded(seed: int) -> None:
    units = [*equal_blocks(Random(seed), 6), head(8, 30)]
    lowest = peak(Line(units, pace).at(len(Line(units, pace).moves)))
    highest = peak([everything(unit) for unit in units])
    costs = []
    for budget in range(lowest, highest + 1, max(1, (highest - lowest) // 15)):
        found = cheapest(units, pace, peak, budget)
        assert peak(found) <= budget
        costs.append(cost(found))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(costs))
    assert cost(cheapest(units, pace, peak, highest)) == 0


def test_blocks_are_recomputed_from_the_first() -> None:
    units = equal_blocks(Random(3), 6)
    line = Line(units, pace)
    for place in range(len(line.moves) + 1):
        saved = [way.saved_bytes for way in line.at(place)]
        assert saved == sorted(saved)  # fewer bytes first
        assert len(set(saved)) <= 2
    assert sum(way.saved_bytes for way in line.at(0)) == sum(unit.saved_bytes for unit in units)


def test_where_nothing_fits_the_peak_is_lowest() -> None:
    units = equal_blocks(Random(1), 3)
    assert peak(cheapest(units, pace, peak, 0)) == min(peak(ways) for ways in all_plans(units))


def test_the_order_of_operators_does_not_matter() -> None:
    unit = random_block(Random(5))
    assert unit.choices is not None
    other = replace(unit, choices=replace(unit.choices, operators=unit.choices.operators[::-1]))
    sizes = [[(way.saved_bytes, way.again) for way in ladder(one, pace)] for one in (unit, other)]
    assert sizes[0] == sizes[1]
