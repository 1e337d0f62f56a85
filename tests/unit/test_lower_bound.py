"""The lower bound of a step: never above the simulated step of any plan, and tight where one resource decides."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest

from deepstow.benchmarks.placements import best_known, instance
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.planner import site_search
from deepstow.strategies.planner.buckets import block_bytes
from deepstow.strategies.planner.lower_bound import Choice, lower_bound
from deepstow.strategies.planner.placement_search import PlacementSearch
from deepstow.strategies.planner.places import OffloadRequest, Places
from deepstow.strategies.planner.site_search import CLOSE, SiteSearch
from deepstow.strategies.planner.step_cost import cost_of
from deepstow.strategies.report.full_report import headline
from tests.unit.test_keep_or_offload import plan_of
from tests.unit.test_placement_search import choose

RECORD = Path("benchmarks/records/2026-11-25_placements")


def search_of(known: Facts, asked: OffloadRequest) -> SiteSearch:
    return SiteSearch(known, asked, Places(known, asked), asked.host_bytes)


def test_the_best_mix_of_two_resources_within_memory() -> None:
    """8 buckets, 3 of which fit on the device: the CPU takes 2 s for one, the link 1 s, so the other 5 in 10/3 s."""
    buckets = [(8.0, [Choice(1.0, (0.0, 0.0)), Choice(0.0, (2.0, 0.0)), Choice(0.0, (0.0, 1.0))])]
    assert lower_bound(buckets, [0.0, 0.0], 3) == pytest.approx(10 / 3)
    assert lower_bound(buckets, [0.0, 1.0], 3) == pytest.approx(4)
    assert lower_bound(buckets, [0.5, 7.0], 8) == pytest.approx(7)


@pytest.mark.parametrize("seed", range(32))
def test_no_placement_takes_less(seed: int) -> None:
    """Uniform, uneven, giant and expert blocks on four machines, clipped or not, several micro-batches or one."""
    _, known, asked = instance(seed, blocks=(2, 4))
    random, search = Random(seed), search_of(known, replace(asked, bucket_bytes=block_bytes(known)))
    places, times = search.places, []
    ladder = places.ladder()
    for one in (*ladder, places.streamed(ladder[-1]), *(tuple(map(random.choice, places.choices)) for _ in range(8))):
        size = places.sizes(one)
        for room in (asked.device_bytes, size.device, size.rest + size.largest_unit + size.weights // 8):
            if (found := search.timed(one, room)) is not None:
                times.append(found.seconds)
                assert search.bound(room) <= found.seconds * (1 + 1e-9)
    assert times


@pytest.mark.parametrize("seed", [0, 4, 8, 12])  # uniform blocks, each machine
def test_the_best_of_all_placements_takes_no_less(seed: int) -> None:
    _, known, asked = instance(seed, blocks=(2, 3))
    search = search_of(known, replace(asked, bucket_bytes=block_bytes(known)))
    assert search.bound(asked.device_bytes) <= best_known(search, asked.device_bytes, None, Random(seed)) * (1 + 1e-9)


def test_the_best_that_long_climbs_found_take_no_less() -> None:
    """Of the instances of the record; nearly tight for some of them."""
    known = map(json.loads, (RECORD / "two-hundred.jsonl").read_text().splitlines())
    best = {one["seed"]: one["best_known"] for one in known}
    bounds = {seed: search_of(*instance(seed)[1:]).bound(instance(seed)[2].device_bytes) for seed in range(0, 200, 5)}
    parts = [bound / best[seed] for seed, bound in bounds.items()]
    assert 0.9 <= max(parts) <= 1 and mean(parts) >= 0.75


def test_nothing_is_simulated_once_a_plan_is_close_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All state on the device takes compute and the device's updates, no more than the bound."""
    counted, simulate = list[float](), site_search.simulated_period

    def simulated(*given: Any, **options: Any) -> float:
        counted.append(simulate(*given, **options))
        return counted[-1]

    monkeypatch.setattr(site_search, "simulated_period", simulated)
    _, known, asked = instance(9, blocks=(2, 2))
    search = search_of(known, asked)
    all_of_it = search.places.sizes(search.places.ladder()[0]).device
    close = search.bound(all_of_it) * (1 + CLOSE)
    assert search.fastest(all_of_it) is not None and len(counted) == 1 and counted[0] <= close
    counted.clear()
    far = search.fastest(all_of_it - 1)
    assert far is not None and far.seconds > search.bound(all_of_it - 1) * (1 + CLOSE) and len(counted) > 50
    counted.clear()  # on the way it looks for the fastest in less memory, and then at one kind of buckets only
    made = PlacementSearch(known, replace(asked, device_bytes=all_of_it), 0).best()
    assert [seconds for seconds in counted if seconds <= made.bound_s * (1 + CLOSE)] == counted[-1:]


def test_a_plan_says_how_far_above_it_is() -> None:
    _, known, asked = instance(2)
    made = choose(known, asked)
    assert known.machine.rates is not None
    cost = cost_of(known, made, known.machine.rates)
    assert cost.to_json()["bound_seconds"] == made.bound_s == cost.bound
    assert cost.bound is not None and 0.7 * cost.seconds <= cost.bound <= cost.seconds
    plan = plan_of(known)
    near, far, unknown = (replace(cost, bound=bound) for bound in (cost.seconds / 1.0199, cost.seconds / 1.081, None))
    assert "s (within 2% of the bound), of which" in headline(plan, near)
    assert "s (at most 9% above the bound), of which" in headline(plan, far)
    assert "bound" not in headline(plan, unknown)
