"""The search over sites beside the best of all placements, on small models: simulated seconds, fixed seeds."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.placements import best_known, instance, lines
from strategies.planner.buckets import block_bytes
from strategies.planner.placement_search import PlacementSearch
from strategies.planner.places import Places
from strategies.planner.site_search import SiteSearch


@pytest.mark.parametrize("seed", [0, 4, 8, 12])  # uniform blocks, each machine
def test_a_plan_is_close_to_the_best_of_all_placements(seed: int) -> None:
    _, facts, request = instance(seed, blocks=(2, 3))
    request = replace(request, bucket_bytes=block_bytes(facts))
    search = SiteSearch(facts, request, Places(facts, request), request.host_bytes)
    ours = search.seconds(PlacementSearch(facts, request, saved_bytes=0).best())
    best = best_known(search, request.device_bytes, None, Random(seed))
    assert best * (1 - 1e-6) <= ours <= 1.02 * best


def test_the_table_names_the_worst_of_each_family() -> None:
    cases = [{"name": "giant, h100, 6 blocks", "ours": ours, "best_known": 2.0} for ours in (2.0, 2.2)]
    text = "\n".join(lines(cases))
    assert "| giant" in text and "1.050" in text and "1.100" in text and "4090" not in text
