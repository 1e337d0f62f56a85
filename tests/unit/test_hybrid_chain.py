"""The exact problem on a chain: P2 and P1 against every plan that there is, and what must hold for any chain."""

from dataclasses import replace
from math import inf

import pytest

from strategies.planner.hybrid.chain import Chain, Layer, Stage, least_bottleneck, least_total
from strategies.planner.hybrid.cluster import Cluster, Wire
from strategies.planner.hybrid.pipeline_clock import StageSeconds, last_backwards
from tests.helpers.chains import every_plan, random_chain, with_wires

SEEDS = range(60)
SAME = pytest.approx


def test_p2_is_the_best_of_all_plans() -> None:
    fitting = 0
    for seed in SEEDS:
        chain = random_chain(seed)
        best = min(map(chain.total, every_plan(chain)))
        found, plan = least_total(chain)
        assert found == SAME(best, rel=1e-12), seed
        assert best == inf or chain.total(plan) == found
        fitting += best < inf
    assert 30 < fitting < 60, "some fit and some do not"


def test_p1_is_the_best_of_all_plans_by_its_own_measure() -> None:
    for seed in SEEDS:
        chain = random_chain(seed, memory=False)
        found, plan = least_bottleneck(chain)
        assert found == SAME(min(map(chain.bottleneck, every_plan(chain))), rel=1e-12), seed
        assert chain.bottleneck(plan) == SAME(found, rel=1e-12)


def test_p1_is_not_the_best_by_the_whole_step() -> None:
    chains = [random_chain(seed, memory=False) for seed in SEEDS[:30]]
    ratios = [chain.total(least_bottleneck(chain)[1]) / least_total(chain)[0] for chain in chains]
    assert min(ratios) == SAME(1.0) and max(ratios) > 1.2


def test_the_total_of_equal_stages_is_that_of_the_clock() -> None:
    """By an event simulation of 1F1B, in which sending takes no time."""
    layer = Layer(1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for stages, micro_batches in ((2, 1), (3, 4), (4, 9)):
        chain = Chain((layer,) * stages, Cluster(stages, stages, Wire(1.0)), micro_batches)
        clock = last_backwards([StageSeconds(1.0, 2.0)] * stages, micro_batches)
        assert chain.total([Stage(at, at + 1, 1) for at in range(stages)]) == SAME(clock[0])


def test_one_rank_has_one_stage() -> None:
    for seed in range(10):
        chain = replace(random_chain(seed, memory=False), cluster=Cluster(1, 1, Wire(1.0)))
        alone = sum(layer.forward + layer.backward for layer in chain.layers)
        assert least_total(chain) == (SAME(chain.micro_batches * alone), (Stage(0, len(chain.layers), 1),))


def test_more_memory_or_a_faster_network_is_never_slower() -> None:
    slower = 0
    for seed in SEEDS[:20]:
        chain = random_chain(seed)
        here = least_total(chain)[0]
        for better in (replace(chain, budget=chain.budget * 1.3), with_wires(chain, 1.7)):
            there = least_total(better)[0]
            assert there <= here * (1 + 1e-12), seed
            slower += there < here
    assert slower > 10, "it mattered"


def test_memory_counts_the_micro_batches_in_flight() -> None:
    """The first of three stages keeps three of them; with two there are no more than two."""
    layer = Layer(1.0, 2.0, 0.0, 0.0, 0.0, 10.0, 0.0)
    chain = Chain((layer,) * 3, Cluster(3, 3, Wire(1.0)), micro_batches=8)
    assert [chain.memory(Stage(0, 1, 1), to_come) for to_come in (2, 1, 0)] == [30.0, 20.0, 10.0]
    assert replace(chain, micro_batches=2).memory(Stage(0, 1, 1), 2) == 20.0


def test_a_group_is_spread_over_machines() -> None:
    cluster = Cluster(64, 8, Wire(100.0, 1.0), Wire(10.0, 3.0))
    assert cluster.spread(8, 1) == (8, 1) and cluster.spread(16, 4) == (2, 8) and cluster.spread(8, 8) == (1, 8)
    assert cluster.gather_seconds(800.0, 8) == SAME(7 / 8 * 8 + 3 * 1.0)
    # Two ranks in each of eight machines: half of the bytes inside, and seven eighths of a half across.
    assert cluster.gather_seconds(800.0, 16, 4) == SAME(0.5 * 8 + 1.0 + 7 / 8 * 40 + 3 * 3.0)
    assert cluster.all_reduce_seconds(800.0, 8) == 2 * cluster.gather_seconds(800.0, 8)
    assert cluster.gather_seconds(800.0, 1, 8) == 0.0
    # The second stage of four ranks is in the machine of the first; the third is not in that of the second.
    assert [cluster.send_seconds(100.0, stage, 4) for stage in (0, 1)] == [SAME(2.0), SAME(13.0)]
