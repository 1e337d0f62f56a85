"""The search over sites: more choices never give a slower plan, and embedding and head may be streamed."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from deepstow.benchmarks.placements import instance
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.layout import Site
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.planner.places import OffloadRequest, Places
from deepstow.strategies.planner.step_cost import cost_of
from tests.unit.test_keep_or_offload import CARD, large
from tests.unit.test_placement_search import choose, request


def seconds(known: Facts, asked: OffloadRequest) -> float:
    assert known.machine.rates is not None
    return cost_of(known, choose(known, asked), known.machine.rates).seconds


@pytest.fixture
def staying_ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and the state of embedding and head never visits the device any more."""
    init = Places.__init__

    def fewer(self: Places, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        self.choices = self.without_visiting_ends

    return lambda: monkeypatch.setattr(Places, "__init__", fewer)


@pytest.mark.parametrize("seed", [0, 3, 8, 11, 12, 15])  # uniform blocks and experts, on three machines
def test_more_choices_are_never_slower(seed: int, staying_ends: Any) -> None:
    """By construction for embedding and head; on these models, but for half a percent, for what is forced, too."""
    _, known, asked = instance(seed, blocks=(2, 4))
    ours = seconds(known, asked)
    for site in ("host", "streamed"):
        with suppress(Refusal):
            assert ours <= seconds(known, replace(asked, site=site)) * 1.005
    staying_ends()
    assert ours <= seconds(known, asked) * (1 + 1e-9)


def test_large_ends_are_streamed_where_the_cpu_is_slow(staying_ends: Any) -> None:
    slow = replace(CARD, update_fp32_params_per_s=4e8, update_bf16_params_per_s=4e8)
    known = large(blocks=4, width=2048, rates=slow)
    asked = request(2 << 30)
    assert Site.STREAMED in {bucket.site for bucket in choose(known, asked).buckets if bucket.name == "embedding"}
    ours = seconds(known, asked)
    staying_ends()
    assert ours < 0.6 * seconds(known, asked)
