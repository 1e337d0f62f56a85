"""The simulator: timelines worked out by hand, and its fast half against the whole."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Site
from deepstow.strategies.planner.problem import (
    Eviction,
    Gap,
    Link,
    Problem,
    Shared,
    Update,
    Weight,
    at_need,
    memory,
    present_ticks,
)
from deepstow.strategies.planner.simulate import Outcome, reload_period, simulate, simulated_period
from deepstow.strategies.planner.tasks import Resource
from tests.unit.planning import blocks, halved, uneven

COMPUTE, UP, DOWN, CPU, NET, DISK = Resource
FAST = Link(0.0, 1.0, 1.0)  # a byte per second


def two_blocks(budget: int = 100, link: Link = FAST) -> Problem:
    """FP 0, FP 1: a second each; BP 1, BP 0: two each. Weights of 3 and 5 bytes; each block saves 1 byte."""
    return blocks([3, 5], [1.0, 1.0], [2.0, 2.0], [1, 1], link, budget)


def with_update(problem: Problem, **changes: Any) -> Problem:
    """Every item updated alike."""
    update = replace(Update(site=Site.HOST, seconds=1.0, grad_bytes=1), **changes)
    return replace(problem, weights=tuple(replace(item, update=update) for item in problem.weights))


def in_slots(problem: Problem, number: int) -> Problem:
    """Gradients and visiting states in so many slots, in turn."""
    weights = tuple(
        replace(item, update=item.update and replace(item.update, grad_slot=at % number, visit_slot=at % number))
        for at, item in enumerate(problem.weights)
    )
    return replace(problem, weights=weights)


def spans(outcome: Outcome, resource: Resource) -> list[tuple[str, float, float]]:
    return [(e.label, round(e.start, 6), round(e.end, 6)) for e in outcome.events if e.resource is resource]


def labels(outcome: Outcome, resource: Resource = COMPUTE) -> list[str]:
    return [label for label, *_ in spans(outcome, resource)]


# The problem


def test_gaps_by_hand() -> None:
    """FP 1 and BP 1 are neighbours, and so are BP 0 and the next FP 0: neither is a gap."""
    problem = two_blocks()
    assert problem.gaps == (Gap(0, 0, 3), Gap(1, 2, 5))
    others = replace(problem, weights=(Weight("head", 4, (1,)), Weight("none", 0, (0,)), Weight("tied", 2, (0, 2, 3))))
    assert others.gaps == (Gap(2, 0, 2), Gap(0, 1, 5))


def test_memory_by_hand() -> None:
    problem = two_blocks()
    turn, boundary = problem.gaps
    assert memory(problem, ()) == [9, 10, 10, 9]
    assert memory(problem, [Eviction(turn, 3)]) == [9, 7, 7, 9]
    assert memory(problem, [Eviction(turn, 2)]) == [9, 7, 10, 9]
    assert memory(problem, [Eviction(boundary, 5), Eviction(turn, 3)]) == [4, 7, 7, 4]
    assert memory(problem, [Eviction(boundary, 4)]) == [9, 10, 10, 4]
    assert present_ticks(problem, at_need([turn, boundary])) == [{0, 3}, {1, 2}]
    assert present_ticks(problem, [Eviction(boundary, 4)]) == [{0, 1, 2, 3}, {0, 1, 2}]


# Weights only


def test_a_reload_is_waited_for_and_hides_if_it_is_issued_earlier() -> None:
    turn = two_blocks().gaps[0]
    resident = simulate(two_blocks(), ())
    assert (resident.period, resident.busy[COMPUTE], resident.binds) == (6.0, 6.0, COMPUTE)
    found = simulate(two_blocks(), [Eviction(turn, 3)])
    assert found.period == 9.0  # three bytes, between BP 1 and BP 0
    assert spans(found, UP) == [("weight 0", 4, 7)]
    assert spans(found, COMPUTE)[-1] == ("BP 0", 7, 9)
    assert found.busy[UP] == 3.0
    assert found.hidden[UP] == 0.0
    assert found.critical == {COMPUTE: 6.0, UP: 3.0, DOWN: 0.0, CPU: 0.0, NET: 0.0, DISK: 0.0}
    earlier = simulate(two_blocks(), [Eviction(turn, 2)])
    assert (earlier.period, earlier.hidden[UP]) == (7.0, 2.0)  # two of its three seconds under BP 1
    assert spans(earlier, UP) == [("weight 0", 2, 5)]


def test_reloads_share_the_link_in_order_of_need() -> None:
    problem = two_blocks(link=Link(0.5, 1.0, 1.0))
    turn, boundary = problem.gaps
    found = simulate(problem, [Eviction(boundary, 4), Eviction(turn, 2)])
    # Weight 1 is issued when BP 0 has ended and hides under FP 0; weight 0 when FP 1 has, and hides under BP 1.
    assert spans(found, COMPUTE) == [("FP 0", 0, 1), ("FP 1", 5.5, 6.5), ("BP 1", 6.5, 8.5), ("BP 0", 10, 12)]
    assert spans(found, UP) == [("weight 1", 0, 5.5), ("weight 0", 6.5, 10)]
    assert found.period == 12.0
    assert reload_period(problem, [Eviction(turn, 2), Eviction(boundary, 4)]) == pytest.approx(12.0)


def test_the_fast_half_is_the_whole_for_any_issues(seeds: range) -> None:
    for seed in seeds[::3]:
        random = Random(seed)
        problem = halved(uneven(seed, (3, 5)))
        tied = replace(problem.weights[0], uses=(0, 2, len(problem.ticks) - 1))
        problem = replace(problem, weights=(tied, *problem.weights[1:]))
        gaps = [gap for gap in problem.gaps if random.random() < 0.6]
        plan = [Eviction(gap, random.randint(gap.after + 1, gap.before)) for gap in gaps]
        whole = simulate(problem, plan, iterations=20)
        assert whole.period == pytest.approx(reload_period(problem, plan), rel=1e-4), seed
        assert simulate(problem, plan).period == simulated_period(problem, plan), seed


# Copies in both directions


def test_copies_in_both_directions_slow_each_other() -> None:
    """Weight 1 (5 bytes, from 6 on) and gradient 0 (4 bytes, from 6 on), each at half the rate while both move."""
    problem = two_blocks(link=Link(0.0, 1.0, 1.0, 0.5))
    items = (
        replace(problem.weights[0], update=Update(site=Site.STREAMED, seconds=0.0, grad_bytes=4, grad_tier=Tier.HOST)),
        problem.weights[1],
    )
    plan = [Eviction(problem.gaps[1], 4)]
    alone = simulate(replace(problem, weights=items, link=FAST), plan)
    both = simulate(replace(problem, weights=items), plan)
    assert both.period > alone.period
    # 8 seconds at half the rate move 4 bytes each; the last byte moves alone.
    assert ("weight 1", 0, 9) in spans(both, UP) and ("gradient 0", 0, 8) in spans(both, DOWN)
    late = simulate(replace(problem, weights=items, link=Link(8.0, 1.0, 1.0, 0.5)), plan)
    assert ("weight 1", 0, 16) in spans(late, UP)  # its latency disturbs nobody: 2 bytes alone, then 3


# Updates


def test_updates_on_the_host_after_the_norm() -> None:
    """The CPU takes the lowest block first; each forward waits for its own weight."""
    problem = with_update(two_blocks())
    found = simulate(problem, ())
    # From 6 (backward ends) on: gradient 0 lands at 7, but gradient 1 landed long before: the CPU is free, takes it.
    assert labels(found, DOWN) == ["gradient 0", "gradient 1"]
    assert spans(found, CPU) == [("update 1", 0, 1), ("update 0", 1, 2)]
    assert spans(found, UP) == [("new weight 1", 1, 6), ("new weight 0", 6, 9)]
    assert found.period == 9 + 6
    early = simulate(replace(problem, in_backward=True), ())
    assert early.hidden[CPU] > 0 and early.period < found.period


def test_the_lowest_block_is_updated_first() -> None:
    problem = with_update(blocks([1, 1, 1], [1.0] * 3, [2.0] * 3, [0] * 3, Link(0, 1, 1e9), 9), seconds=4.0)
    # When the norm is known, 1 and 2 have landed; 0 lands during the first update and comes next.
    assert labels(simulate(problem, ()), CPU)[:3] == ["update 1", "update 0", "update 2"]


def test_updates_on_the_device_are_compute() -> None:
    problem = with_update(two_blocks(), site=Site.DEVICE, seconds=0.5)
    found = simulate(problem, ())
    assert found.period == 7.0
    assert labels(found) == ["update 0", "FP 0", "update 1", "FP 1", "BP 1", "BP 0"]
    assert spans(found, UP) == spans(found, DOWN) == []
    in_backward = simulate(replace(problem, in_backward=True), ())
    assert labels(in_backward) == ["FP 0", "FP 1", "BP 1", "update 1", "BP 0", "update 0"]


def test_states_visit_within_their_slots() -> None:
    problem = with_update(two_blocks(), site=Site.STREAMED, seconds=1.0, state_bytes=2)
    found = simulate(in_slots(problem, 1), ())
    # Up 0-2, update 2-3, FP 0 3-4, down 3-5; the one slot is free at 5: up 5-7, update 7-8.
    assert spans(found, UP) == [("state 0", 0, 2), ("state 1", 5, 7)]
    assert spans(found, COMPUTE)[:4] == [("update 0", 2, 3), ("FP 0", 3, 4), ("update 1", 7, 8), ("FP 1", 8, 9)]
    assert spans(simulate(in_slots(problem, 2), ()), UP) == [("state 0", 0, 2), ("state 1", 2, 4)]


def test_compute_waits_for_the_place_of_the_gradient_that_it_has_made() -> None:
    """7 bytes take 2.8 s. With one slot, what follows BP 0 waits until gradient 1 is down, and BP 0 takes 2. Without
    one it waits after BP 1 and BP 0, and not after a gradient that has memory of its own.
    """
    update = {"grad_bytes": 7, "seconds": 0.0, "grad_tier": Tier.HOST}
    problem = replace(with_update(two_blocks(link=Link(0, 1e9, 2.5)), **update), accumulation=2)
    direct = with_update(problem, **update, grad_direct=True)
    mixed = replace(problem, weights=(problem.weights[0], direct.weights[1]))
    cases = ((in_slots(problem, 1), (0, 0.8)), (in_slots(problem, 2), (0, 0)), (direct, (2.8, 2.8)), (mixed, (2.8, 0)))
    for given, waits in cases:
        compute = spans(simulate(given, ()), COMPUTE)
        for name, wait in zip(("BP 1", "BP 0"), waits, strict=True):
            after = [then[1] - now[2] for now, then in pairwise(compute) if now[0] == name]
            assert min(after) == pytest.approx(wait)  # after the last pass it waits for the update as well


def test_a_gradient_goes_down_when_the_update_before_has_left_its_slot_on_the_host() -> None:
    """Each takes 1 s to go down, and its update 5 s."""
    problem = with_update(two_blocks(link=Link(0, 1e9, 1.0)), grad_bytes=1, seconds=5.0, grad_tier=Tier.HOST)
    problem = replace(problem, in_backward=True)
    for parked_slot, begins in ((None, 0.0), (0, 4.0)):  # after BP 0, which begins when gradient 1 goes down, takes 2
        asked = with_update(problem, grad_bytes=1, seconds=5.0, grad_tier=Tier.HOST, parked_slot=parked_slot)
        down = spans(simulate(asked, ()), DOWN)
        assert [start for label, start, _ in down if label == "gradient 0"] == [begins]


def test_a_weight_that_backward_does_not_read_has_its_gradient_there() -> None:
    """As an embedding's: it is read at tick 0 alone, comes up once, and its gradient goes down after BP 0."""
    update = {"grad_bytes": 1, "seconds": 0.0, "grad_tier": Tier.HOST}
    problem = with_update(two_blocks(), **update)
    first = replace(problem.weights[0], uses=(0,), gradient_tick=3)
    problem = replace(problem, weights=(first, problem.weights[1]))
    assert [(gap.after, gap.before) for gap in problem.gaps if gap.weight == 0] == [(0, 4)]
    found = simulate(problem, at_need(problem.gaps))
    ended = max(end for label, _, end in spans(found, COMPUTE) if label == "BP 0")
    assert {start for label, start, _ in spans(found, DOWN) if label == "gradient 0"} <= {0.0, ended}
    assert sum(label == "weight 0" for label, *_ in spans(found, UP)) == 1


# Memories that copies and updates share


def test_copies_and_updates_share_the_memory_of_the_host() -> None:
    """A copy of 4 B at 1 B/s beside an update that touches 12 B in 4 s, of a memory that gives 2 B/s."""
    problem = with_update(two_blocks(), seconds=4.0, grad_bytes=4, touched_bytes=12)
    alone = simulate(problem, ())
    assert alone.busy[CPU] == pytest.approx(8.0)
    wide = replace(problem, shared=Shared(dram=5.0, device=5.0))  # enough for an update and a copy in each direction
    assert simulate(wide, ()).events == alone.events
    slow = simulate(replace(problem, shared=Shared(dram=2.0)), ())
    # Each update needs 3 B/s at full speed, so 6 s alone; beside copies at 1 B/s each it gets less.
    assert slow.busy[CPU] > 12.0
    # 24 B of updates, 8 of gradients and 8 of new weights in each iteration.
    assert slow.least["DRAM"] == pytest.approx((24 + 8 + 8) / 2.0)
    assert slow.period >= 20.0


def test_two_streams_of_one_direction_share_the_link() -> None:
    """What forward saves goes down beside gradients, at half the rate each."""
    update = {"seconds": 0.0, "grad_bytes": 2, "grad_tier": Tier.HOST}
    problem = replace(with_update(two_blocks(link=Link(0, 1e9, 0.5)), **update), accumulation=2)
    ticks = tuple(replace(tick, hosted_bytes=1 if tick.name == "FP 0" else 0) for tick in problem.ticks)
    down = spans(simulate(replace(problem, ticks=ticks), ()), DOWN)
    # Of gradient 1, made at 12, half a byte is left at 15, when FP 0 of the second pass ends. Gradient 0 comes next.
    assert down[3:6] == [("gradient 1", 12, 17), ("saved by FP 0", 15, 19), ("gradient 0", 17, 22)]


def test_without_an_accelerator_everything_runs_on_the_same_cores() -> None:
    problem = with_update(two_blocks(), seconds=2.0, grad_bytes=1)
    found = simulate(replace(problem, shared=Shared(cores=True)), ())
    # Compute 6 s, updates 4, gradients of 2 B and weights of 8 B at a byte per second.
    assert found.period == pytest.approx(6 + 4 + 2 + 8)


def test_gradients_that_rest_on_the_host_are_added_there() -> None:
    problem = replace(with_update(two_blocks(), grad_tier=Tier.HOST, seconds=1.0), accumulation=3)
    found = simulate(replace(problem, shared=Shared(dram=3.0)), ())
    assert labels(found, CPU).count("sum 0") == 2
    assert found.busy[CPU] >= 2 * 1.0 + 4 * 1.0  # two updates, and four sums of 1 B that touch 3 B


def test_ranks_exchange_what_each_has_a_part_of() -> None:
    """Of two ranks each copies half of a weight and gets the other half, at a byte per second."""
    plain = two_blocks()
    halves = replace(
        plain, weights=tuple(replace(item, shards=2) for item in plain.weights), shared=Shared(network=1.0)
    )
    found = simulate(halves, [Eviction(halves.gaps[0], 2)])
    assert spans(found, UP) == [("weight 0", 2, 3)] and spans(found, NET) == [("gather 0", 3, 5)]
    assert spans(found, COMPUTE)[-1] == ("BP 0", 5, 7)
    shared = with_update(halves, site=Site.HOST, seconds=1.0, grad_bytes=1, exchange_bytes=3, grad_tier=Tier.HOST)
    found = simulate(shared, ())
    ends = {label: end for label, _, end in spans(found, COMPUTE)}
    times = {label: (start, end) for label, start, end in spans(found, NET)}
    assert times["gradient 1"] == (ends["BP 1"], ends["BP 1"] + 3)
    ((_, start, _),) = [span for span in spans(found, DOWN) if span[0] == "gradient 1"]
    assert (start - ends["BP 1"] - 3) % found.period == pytest.approx(0)
    assert found.least["network"] == pytest.approx(3 + 3 + 2 + 3)  # gradients; 2 of 3 B and 3 of 5 B of new weights
    slower = replace(shared, shared=replace(shared.shared, sums=2.0))
    assert simulate(slower, ()).least["network"] == pytest.approx(2 * (3 + 3) + 2 + 3)
    on_device = with_update(halves, site=Site.DEVICE, seconds=1.0, grad_bytes=1, exchange_bytes=3)
    assert set(labels(simulate(on_device, ()), NET)) == {"gather 0", "gather 1", "gradient 0", "gradient 1"}


def test_exchanges_by_way_of_the_host_use_the_links() -> None:
    """Of two ranks each gathers half of a weight: alone a byte takes a second, and half of each link's byte per second.
    What copies go down at the same time have the other half.
    """
    update = {"site": Site.STREAMED, "seconds": 0.0, "grad_bytes": 0, "state_bytes": 6}
    problem = with_update(blocks([8, 8], [0.5] * 2, [0.5] * 2, [0] * 2, Link(0, 2.0, 2.0), 100), **update)
    problem = replace(problem, weights=tuple(replace(item, shards=2) for item in problem.weights))
    apart, by_host = (replace(problem, shared=Shared(network=1.0, through_host=flag)) for flag in (False, True))
    first, second = simulate(apart, ()), simulate(by_host, ())
    assert second.period > first.period and second.least["network"] == first.least["network"] == 8.0
    assert second.least["link up"] == first.least["link up"] + 4.0 == 6.0 + 4.0
    assert simulate(replace(by_host, shared=replace(by_host.shared, dram=1.0)), ()).least["DRAM"] == 2 * 12 + 2 * 8


def test_a_reload_waits_until_a_new_weight_at_its_addresses_is_down() -> None:
    """Weight 1 comes back to bytes of which weight 0, updated on the device, still goes down."""
    problem = with_update(two_blocks(link=Link(0, 8.0, 0.25)), site=Site.DEVICE, seconds=0.5)
    away = at_need(problem.gaps)
    first, second = problem.weights
    sharing = replace(problem, weights=(replace(first, overlapping=(1,)), replace(second, overlapping=(0,))))
    found = simulate(sharing, away)
    assert found.period > simulate(problem, away).period
    leaves = {end for label, _, end in spans(found, DOWN)}
    assert leaves and all(
        start >= min(leaves) or start <= 0 for label, start, _ in spans(found, UP) if label == "weight 1"
    )


# What forward saves on the host


def saving(num_bytes: int, link: Link = FAST, **changes: Any) -> Problem:
    """Three blocks, a second forward and two backward; the first one sends so many bytes to the host."""
    problem = replace(blocks([1, 1, 1], [1.0] * 3, [2.0] * 3, [0] * 3, link, 100), **changes)
    first, *others = problem.ticks
    return replace(problem, ticks=(replace(first, hosted_bytes=num_bytes), *others))


def test_it_crosses_in_every_pass_and_shares_the_link() -> None:
    outcome = simulate(saving(2, accumulation=3), ())
    assert (outcome.busy[UP], outcome.busy[DOWN]) == (pytest.approx(6), pytest.approx(6))
    assert outcome.period == pytest.approx(3 * 9 + 3 * 1)  # each pass waits a second for its way down
    weights = simulate(saving(0), at_need(saving(0).gaps)).busy[UP]
    assert simulate(saving(2), at_need(saving(2).gaps)).busy[UP] == pytest.approx(weights + 2)


@pytest.mark.parametrize(
    ("slots", "overlap", "period", "reads", "writes"),
    [
        (1, 1.0, 15.0, [(0, 2), (7, 9)], [(3, 7), (10, 14)]),  # what is read next waits until the slot is written
        (2, 2.0, 10.0, [(0, 2), (2, 4)], [(3, 7), (7, 11)]),  # reads and writes do not disturb each other
        (2, 1.0, 12.0, None, None),  # they do: 4 bytes of two weights, at 2 and at 1 byte per second
    ],
)
def test_state_from_the_disk(slots: int, overlap: float, period: float, reads: Any, writes: Any) -> None:
    """Read into a slot once the update is submitted, updated in a second, written behind."""
    problem = with_update(two_blocks(), disk_bytes=4, grad_bytes=0)
    weights = tuple(
        replace(each, update=each.update and replace(each.update, window_slot=at % slots))
        for at, each in enumerate(problem.weights)
    )
    shared = Shared(disk=(2.0, 1.0), disk_overlap=overlap)
    found = simulate(replace(problem, weights=weights, shared=shared, link=Link(0.0, 1e9, 1e9)), ())
    assert round(found.period, 6) == period
    assert found.least["disk"] == 12 / overlap
    if reads is not None:
        spots = {kind: [(a, b) for label, a, b in spans(found, DISK) if label.startswith(kind)] for kind in ("r", "w")}
        assert spots["r"] == reads
        assert [one for one in spots["w"] if one[0] > 0] == writes


@pytest.mark.parametrize(("slots", "period"), [(1, 10.0), (2, 8.0)])
def test_frozen_weights_from_the_disk(slots: int, period: float) -> None:
    """Read at a byte per second for each of two reloads, ahead where the slot is free: of one slot when UP has read it.
    What the disk takes is known to the search as well.
    """
    problem = two_blocks(link=Link(0.0, 4.0, 1e9))
    weights = tuple(
        replace(each, num_bytes=4, disk_bytes=4, disk_slot=at % slots) for at, each in enumerate(problem.weights)
    )
    problem = replace(problem, weights=weights, shared=Shared(disk=(1.0, 1.0)))
    evictions = at_need(problem.gaps)
    found = simulate(problem, evictions)
    assert (len(evictions), found.least["disk"], round(found.period, 6)) == (2, 8.0, period)
    assert reload_period(problem, evictions) == 14.0  # which knows no reading ahead
