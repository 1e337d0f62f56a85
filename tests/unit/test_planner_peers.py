"""Models of other systems' policies: by hand on a small problem, and in the order that they should come in."""

from dataclasses import replace

import pytest

from benchmarks.peer_models import (
    UpdateCosts,
    mega_train,
    on_demand,
    prime_rl,
    super_offload,
    twin_flow,
    whole_bucket,
    zen_flow,
    zero_offload,
)
from strategies.core.layout import Site
from strategies.planner.greedy import DoesNotFit, choose
from strategies.planner.simulate import reload_period, simulate
from strategies.planner.tasks import Resource
from tests.unit.planning import blocks, complaints, span, uneven
from tests.unit.test_planner_simulate import two_blocks

COSTS = UpdateCosts(host=0.5, device=0.1)


def test_zero_offload_by_hand() -> None:
    """Backward ends at 6. Gradient 1 (5 bytes) goes down from 4 to 9, gradient 0 (3 bytes) after it, until 12."""
    policy = zero_offload(two_blocks(), COSTS)
    assert policy.evictions == ()
    assert policy.state_bytes == 0
    outcome = policy.outcome()
    # CPU: bucket 1 from 9 to 11.5, bucket 0 from 12 to 13.5. Up: bucket 1 from 11.5 to 16.5, bucket 0 until 19.5.
    assert outcome.period == pytest.approx(19.5)
    assert outcome.hidden[Resource.CPU] == 0.0
    assert outcome.hidden[Resource.DOWN] == pytest.approx(2.0)


def test_twin_flow_shares_the_updates() -> None:
    problem = two_blocks()
    half = twin_flow(problem, COSTS, 0.3)
    assert [item.update.site for item in half.problem.weights if item.update] == [Site.HOST, Site.DEVICE]
    assert half.state_bytes == 35
    assert half.peak == 10 + 35
    assert half.outcome().period < zero_offload(problem, COSTS).outcome().period
    all_on_the_cpu = twin_flow(problem, COSTS, 1.0)
    assert all_on_the_cpu.outcome() == zero_offload(problem, COSTS).outcome()
    none = twin_flow(problem, COSTS, 0.0)
    assert none.outcome().busy[Resource.DOWN] == 0.0
    assert none.outcome().period == pytest.approx(6.8)


def test_on_demand_brings_everything_when_it_is_used() -> None:
    problem = two_blocks()
    policy = on_demand(problem, COSTS)
    assert policy.peak == span(problem)[0]
    assert {eviction.gap for eviction in policy.evictions} == set(problem.gaps)
    assert policy.outcome().period > zero_offload(problem, COSTS).outcome().period
    ahead = mega_train(problem, COSTS)
    assert all(eviction.issue == eviction.gap.before - 1 for eviction in ahead.evictions)
    assert ahead.outcome().period <= policy.outcome().period


def test_forward_waits_for_all_serial_updates() -> None:
    """Also for those of weights that are away and come when they are used."""
    problem = blocks([1, 4, 1], [1.0] * 3, [2.0] * 3, [0] * 3, replace(two_blocks().link, up=8.0, down=8.0), 100)
    outcome = on_demand(problem, UpdateCosts(host=5.0, device=0.1)).outcome()
    compute = [event for event in outcome.events if event.resource is Resource.COMPUTE]
    assert compute[0].label == "FP 0"
    assert all(e.end <= compute[0].start + 1e-9 or e.start >= compute[-1].start for e in outcome.events
               if e.resource is Resource.CPU)  # fmt: skip


def test_whole_buckets_leave_in_all_their_gaps_and_single_gaps_gain() -> None:
    """Of many buckets only some sets are tried."""
    ratios = []
    for problem in (*map(uneven, range(30)), uneven(5, (14,))):
        policy = whole_bucket(problem)
        assert complaints(problem, policy.evictions) == []
        leaving = {eviction.gap.weight for eviction in policy.evictions}
        assert {eviction.gap for eviction in policy.evictions} == {g for g in problem.gaps if g.weight in leaving}
        ratios.append(policy.outcome().period / reload_period(problem, choose(problem)))
    assert min(ratios) > 1 - 1e-6 and sum(ratios) / len(ratios) > 1.005
    with pytest.raises(DoesNotFit):
        whole_bucket(replace(problem, budget=span(problem)[0] - 1))


def test_speculative_updates_begin_in_backward() -> None:
    """The CPU updates bucket 1 while BP 0 runs; forward waits for all updates."""
    problem = blocks([8] * 6, [1.0] * 6, [2.0] * 6, [2] * 6, replace(two_blocks().link, up=8.0, down=8.0), 100)
    costs = UpdateCosts(host=0.2, device=0.02)
    for policy in (super_offload(problem, costs, 1.0), prime_rl(problem, costs)):
        outcome = policy.outcome()
        assert outcome.hidden[Resource.CPU] > 0.5 * outcome.busy[Resource.CPU]
        assert zero_offload(problem, costs).outcome().period > outcome.period
        assert outcome.period > simulate(policy.problem, ()).period - 1e-9  # ours need not wait for all of them
        assert policy.gives_up
    part = super_offload(problem, costs, 0.5)
    sites = [item.update.site for item in part.problem.weights if item.update]
    assert sites == [Site.DEVICE] * 3 + [Site.HOST] * 3  # what backward reaches last is updated where it is
    assert part.state_bytes == 6 * 24


def test_zen_flow_updates_a_tenth_on_the_device() -> None:
    policy = zen_flow(two_blocks(), COSTS, part=0.4)
    assert [(item.name, item.num_bytes) for item in policy.problem.weights] == [
        ("0/device", 1), ("0/host", 1), ("1/device", 2), ("1/host", 3)
    ]  # fmt: skip
    assert policy.state_bytes == int(7 * 0.4 * 8)
