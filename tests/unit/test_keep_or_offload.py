"""Sites, weights and budget decided together: more memory is never slower, sizes are right; edits."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from deepstow.benchmarks.placements import best_known, instance
from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, Precision, Rates, Tier
from deepstow.strategies.core.layout import Item, Site, aligned, needs
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.registry import find
from deepstow.strategies.offload import Offload
from deepstow.strategies.planner import edits
from deepstow.strategies.planner.addresses import place, slot_pools
from deepstow.strategies.planner.buckets import block_bytes, capacity
from deepstow.strategies.planner.places import OffloadRequest, Places
from deepstow.strategies.planner.site_search import SiteSearch
from deepstow.strategies.planner.step_cost import cost_of
from deepstow.strategies.planner.weight_schedule import ASSUMED, only_while_used
from tests.helpers.fakes import GPU
from tests.helpers.layouts import random_facts, transformer
from tests.helpers.marks import slowly
from tests.unit.test_placement_search import choose, options, request

GIB = 1 << 30
CARD = replace(ASSUMED, update_fp32_params_per_s=4e9, update_bf16_params_per_s=4e9)


def large(blocks: int = 32, width: int = 4096, tokens: int = 4096, rates: Rates | None = CARD, **run: Any) -> Facts:
    """A transformer of a Llama's size in bf16."""
    work = {"micro_batch": 1, "sequence": tokens, "max_grad_norm": 1.0, "recomputes": True, **run}
    known = transformer(blocks, width, dtype="bfloat16", words=32000, machine=replace(GPU, rates=rates), **work)
    flops = 2 * sum(param.num_elements for param in known.params) * tokens
    return replace(known, run=replace(known.run, precision=Precision.BF16, forward_flops=flops))


def seconds(known: Facts, device_bytes: int) -> float:
    assert known.machine.rates is not None
    return cost_of(known, choose(known, request(device_bytes)), known.machine.rates).seconds


@settings(max_examples=12, deadline=None)
@given(random_facts(), options)
def test_the_sizes_of_a_placement_are_those_of_its_layout(known: Facts, asked: dict[str, Any]) -> None:
    placements = Places(known, request(**asked))
    for placement in placements.ladder():
        for shared in (placement, placements.streamed(placement)):
            sizes, made = placements.sizes(shared), placements.layout(shared)
            assert sizes.device == place(made).num_bytes(Tier.DEVICE)
            assert sizes.host == place(made).num_bytes(Tier.HOST)
            assert sizes.weights >= sizes.largest_unit >= 0 and sizes.rest >= 0
            copies = {weight.index: weight.copy_bytes for weight in placements.movable(shared)}
            away = only_while_used(made, copies)
            rounded = sum(pool.num_bytes for pool in slot_pools(away) if pool.item is Item.COPY)
            assert sizes.host + sum(copies.values()) + rounded == place(away).num_bytes(Tier.HOST)


@settings(max_examples=12, deadline=None)
@given(random_facts(), options)
def test_the_least_bytes_are_those_of_each_bucket_at_its_smallest_place(known: Facts, asked: dict[str, Any]) -> None:
    """Without slots, which buckets share; a plan is refused by them before anything is worked out."""
    places = Places(known, request(**asked))
    leave = {*places.blocks, *places.offloadable(tuple(choices[-1] for choices in places.choices))}

    def least(index: int) -> int:
        found = []
        for choice in places.choices[index]:
            placement = tuple(choice if at == index else some[0] for at, some in enumerate(places.choices))
            made = places.layout(placement)
            for layout in (made, only_while_used(made, [index])) if index in leave else (made,):
                held = [need for need in needs(layout.buckets[index], layout) if not need.passes]
                found.append(sum(aligned(need.num_bytes, need.tier) for need in held))
        return min(found)

    assert places.least_bytes == sum(map(least, range(len(places.buckets))))


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    """A climb may miss 1 % of what the one for less memory found."""
    known = large(blocks=4, max_grad_norm=0.0)
    found = []
    for size in (2, 3, 4, 6, 40):
        try:
            found.append(seconds(known, size * GIB))
        except Refusal:
            assert not found, "what fits into less fits into more"
    assert len(found) > 4
    for slow, fast in pairwise(found):
        assert fast <= slow * 1.01
    assert found[-1] < 0.8 * found[0]


def test_blocks_are_cut_as_far_as_it_shortens_what_moves() -> None:
    known = large(blocks=32)
    block = block_bytes(known, "bfloat16")
    found = capacity(known)
    assert found is not None and block / 8 <= found <= block / 2  # sqrt(U a b bytes) is about 150 MB, a block 400 MB
    tiny = replace(transformer(), machine=replace(GPU, rates=CARD))
    assert capacity(tiny) == block_bytes(tiny)  # a copy of less would cost its latency
    assert capacity(large(rates=None)) is None


def plan_of(known: Facts, **options: Any) -> Plan:
    return compose({"offload": find("offload").model_validate(options)}, known)


def test_edits_are_ranked_and_honest() -> None:
    known = large(blocks=8, tokens=1024)
    asked = request(6 * GIB)
    found = edits.ranked(known, asked, 0)
    assert 0 < len(found) <= edits.SHOWN
    gains = list(found.values())
    assert gains == sorted(gains, reverse=True) and gains[-1] > edits.WORTH
    lines = Offload(gpu_memory="6GiB").suggest(plan_of(known, gpu_memory="6GiB"))
    assert len(lines) == len(found) and any("(a batch of twice as many): about +" in line for line in lines)
    assert edits.ranked(replace(known, machine=replace(GPU, rates=None)), asked, 0) == {}


def test_where_slots_for_the_largest_states_do_not_fit_the_smaller_ones_are_streamed() -> None:
    """Eight ranks of a machine with a slow CPU, a model with one giant block, and hardly more memory than is needed."""
    _, known, asked = instance(10, ranks=8)
    asked = replace(asked, device_bytes=1640 << 20)
    search = SiteSearch(known, asked, Places(known, asked), asked.host_bytes)
    last, sizes = search.places.ladder()[-1], [bucket.weight_bytes for bucket in search.places.buckets]
    streamed = search.places.streamed(last)
    some = [tuple(here if size <= most else there for here, there, size in zip(streamed, last, sizes, strict=True))
            for most in sorted(set(sizes))]  # fmt: skip
    times = [found.seconds for one in some if (found := search.timed(one, asked.device_bytes)) is not None]
    assert len(times) < len(some), "some fit, and streaming all does not"
    assert search.seconds(choose(known, asked)) <= 1.02 * min(times)


@pytest.mark.parametrize("seed", [0, 8])  # uniform blocks, two machines
def test_a_plan_is_close_to_the_best_of_all_placements(seed: int) -> None:
    _, known, asked = instance(seed, blocks=(2, 3))
    asked = replace(asked, bucket_bytes=block_bytes(known))
    search = SiteSearch(known, asked, Places(known, asked), asked.host_bytes)
    ours = search.seconds(choose(known, asked))
    best = best_known(search, asked.device_bytes, None, Random(seed))
    assert best * (1 - 1e-6) <= ours <= 1.03 * best


@pytest.mark.parametrize(
    ("seed", "best", "most"),  # seconds of the best that is known, and what the search finds
    [slowly(14, 1.43256, 1.02), (86, 0.94369, 1.02), slowly(8, 0.14569, 1.045), (12, 0.25461, 1.02)],
)
def test_a_plan_is_close_to_the_best_that_long_climbs_found(seed: int, best: float, most: float) -> None:
    """Four instances of ``benchmarks/placements.py`` that show when a part of the search does less."""
    _, known, asked = instance(seed)
    assert known.machine.rates is not None
    assert cost_of(known, choose(known, asked), known.machine.rates).seconds <= most * best


# More choices never give a slower plan, and embedding and head may be streamed


def seconds_of(known: Facts, asked: OffloadRequest) -> float:
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


@pytest.mark.parametrize("seed", [0, slowly(12)])  # uniform blocks and experts, on two machines
def test_more_choices_are_never_slower(seed: int, staying_ends: Any) -> None:
    """By construction for embedding and head; on these models, but for half a percent, for what is forced, too."""
    _, known, asked = instance(seed, blocks=(2, 4))
    ours = seconds_of(known, asked)
    for site in ("host", "streamed"):
        with suppress(Refusal):
            assert ours <= seconds_of(known, replace(asked, site=site)) * 1.005
    staying_ends()
    assert ours <= seconds_of(known, asked) * (1 + 1e-9)


def test_large_ends_are_streamed_where_the_cpu_is_slow(staying_ends: Any) -> None:
    slow = replace(CARD, update_fp32_params_per_s=4e8, update_bf16_params_per_s=4e8)
    known = large(blocks=4, width=2048, rates=slow)
    asked = request(2 << 30)
    assert Site.STREAMED in {bucket.site for bucket in choose(known, asked).buckets if bucket.name == "embedding"}
    ours = seconds_of(known, asked)
    staying_ends()
    assert ours < 0.6 * seconds_of(known, asked)
