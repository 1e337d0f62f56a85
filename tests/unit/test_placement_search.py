"""The placement search: the order of its measures by hand, its refusals to the letter, its budgets on random models."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepstow.strategies.core.facts import Facts, Param, Rates, Tier
from deepstow.strategies.core.layout import Item, Layout, Site, aligned
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.sizes import parse_bytes
from deepstow.strategies.core.validate import validate
from deepstow.strategies.planner.addresses import place, slot_pools, weight_packing
from deepstow.strategies.planner.buckets import block_bytes
from deepstow.strategies.planner.placement_search import PlacementSearch
from deepstow.strategies.planner.places import OffloadRequest, Places
from deepstow.strategies.planner.step_cost import cost_of
from deepstow.strategies.planner.weight_schedule import ASSUMED, alone, fitted
from tests.helpers.fakes import GPU
from tests.helpers.layouts import facts_of, random_facts, transformer

PLENTY = 1 << 50
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def request(device_bytes: int = PLENTY, host_bytes: int = PLENTY, **changes: Any) -> OffloadRequest:
    return OffloadRequest(
        device_bytes=device_bytes, host_bytes=host_bytes, gpu_memory=device_bytes, host_memory=host_bytes, **changes
    )


def choose(known: Facts, asked: OffloadRequest, saved: int = 0) -> Layout:
    return PlacementSearch(known, asked, saved).best()


def chosen(known: Facts, device_bytes: int = PLENTY, saved: int = 0, **changes: Any) -> Layout:
    return choose(known, request(device_bytes, **changes), saved)


def device_bytes(made: Layout) -> int:
    return place(made).num_bytes(Tier.DEVICE)


def every_budget(known: Facts, **changes: Any) -> list[Layout]:
    """The layouts from plenty of memory down to the least, each made by taking one byte from the one before."""
    found = [chosen(known, **changes)]
    while True:
        try:
            found.append(chosen(known, device_bytes(found[-1]) - 1, **changes))
        except Refusal:
            return found


def matrices(*units: str) -> list[Param]:
    """One in each unit."""
    return [Param(f"{unit}.w", unit, 64 * 64, "float32", 0) for unit in units]


# The order of measures


def test_what_fits_is_not_moved() -> None:
    made = chosen(transformer())
    assert {(b.site, b.resident, b.grad_tier) for b in made.buckets} == {(Site.DEVICE, True, DEVICE)}
    exact = device_bytes(made)
    assert chosen(transformer(), exact) == made
    assert chosen(transformer(), exact + 7, saved=7) == made
    assert chosen(transformer(), exact + 6, saved=7) != made


def travels(made: Layout) -> list[str]:
    return [b.name for b in made.buckets if not b.resident]


def test_first_the_last_states_then_gradients_then_weights() -> None:
    """With accumulation gradients stay as long as they can. Nobody knows the rates, so nothing is weighed up."""
    stages = []
    for made in every_budget(transformer(groups=False, blocks=6, accumulation=2)):
        sites = [b.site for b in made.buckets]
        grad_tier = [b.grad_tier for b in made.buckets]
        stages.append((sites.count(Site.HOST), grad_tier.count(HOST), len(travels(made))))
        assert sites == sorted(sites, key=[Site.DEVICE, Site.HOST].index)
        assert grad_tier == sorted(grad_tier, key=[DEVICE, HOST].index)
        if HOST in grad_tier:
            assert Site.DEVICE not in sites
        if travels(made):
            assert DEVICE not in grad_tier
    assert stages[0] == (0, 0, 0)
    assert stages[-1] == (14, 14, 14)  # at the least in twice as many buckets
    assert (8, 8, 8) in stages
    placements = [stage[:2] for stage in stages]
    assert placements == sorted(placements)


def test_a_single_micro_batch_is_sent_down_at_once() -> None:
    for made in every_budget(transformer(groups=False)):
        assert all((b.site is Site.HOST) is (b.grad_tier is HOST) for b in made.buckets)


def there(made: Layout) -> list[int]:
    """How many travelling weights are there at each step."""
    return [
        sum(any(start <= step < end for start, end in b.resident_ticks) for b in made.buckets)
        for step in range(made.num_ticks)
    ]


def test_weights_told_to_travel_come_a_few_steps_ahead() -> None:
    known = transformer(blocks=8, groups=False)
    assert max(there(chosen(known, weights="streamed"))) == 3
    assert max(there(chosen(known, weights="streamed", prefetch=4))) == 5
    assert max(there(chosen(known, weights="streamed", prefetch=0))) == 1


def test_all_pieces_of_a_block_are_present_together() -> None:
    known = transformer(blocks=8, groups=False)
    made = chosen(known, weights="streamed", bucket_bytes=5 * 64 * 64 * 4, prefetch=0)
    assert travels(made)[:3] == ["layers.0/0", "layers.0/1", "layers.1/0"]
    assert set(there(made)) == {0, 2}


def test_no_more_travels_than_must_and_as_early_as_there_is_room() -> None:
    known = transformer(blocks=8, groups=False)
    block = 12 * 64 * 64 * 4
    sizes = []
    for budget in range(device_bytes(every_budget(known)[-1]), 26 * block, block):
        made = chosen(known, budget, site="host")
        used = device_bytes(made)
        assert used <= budget
        sizes.append(len(travels(made)))
        if travels(made):
            assert budget - used < 3 * block  # what is left is not enough to keep another one
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


# What stays


def test_small_buckets_and_widely_used_ones_stay() -> None:
    made = chosen(transformer(blocks=8), weights="streamed")
    assert [b.name for b in made.buckets if b.resident] == ["embedding", "layers.0..7", "head:group1", "head:group0"]
    known = transformer(blocks=4, groups=False)
    packed = chosen(known, weights="streamed", bucket_bytes=10 * 12 * 64 * 64 * 4)
    assert [b.name for b in packed.buckets] == ["embedding", "layers.0..3", "head"]
    assert all(b.resident for b in packed.buckets)


def test_a_tied_table_leaves_between_its_uses() -> None:
    tied = Param("tokens.w", "embedding", 2 * 64 * 64, "float32", 0, ("head",))
    blocks = matrices(*(f"layers.{i}" for i in range(6)))
    known = facts_of(tied, *blocks, Param("norm.w", "head", 8, "float32", 0))
    table = every_budget(known)[-1].buckets[0]
    assert table.units == ("embedding", "head") and not table.resident
    assert table.resident_ticks == ((0, 1), (7, 9), (15, 16))


def test_a_parameter_that_is_in_use_beside_other_units_stays() -> None:
    positions, *others = matrices("embedding", *(f"model.layers.{i}" for i in range(4)), "head")
    known = facts_of(replace(positions, elsewhere=True), *others)
    least = every_budget(known)[-1]
    assert least.buckets[0].resident and not least.buckets[-1].resident
    # Over ranks its gradient would hold a slot until all have exchanged it, which is at the end of backward.
    for ranks, home in ((1, HOST), (2, DEVICE)):
        made = chosen(replace(known, run=replace(known.run, world_size=ranks)), site="host", gradients="host")
        assert [bucket.grad_tier for bucket in made.buckets] == [home, HOST, HOST, HOST, HOST, HOST]


def test_what_stands_between_two_stacks_of_blocks_stays() -> None:
    blocks = ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    known = facts_of(*matrices("embedding", *blocks, "head"))
    assert {name for made in every_budget(known) for name in travels(made)} <= {*blocks}


@pytest.mark.parametrize(("rates", "frozen_as"), [(None, ""), (ASSUMED, "fp8")])
def test_frozen_weights_travel_while_the_adapters_stay(frozen_as: str, rates: Rates | None) -> None:
    """Where all fits, none does: a place for codes on the device is for those that travel."""
    known = transformer(blocks=6, frozen=True, machine=replace(GPU, rates=rates))
    made = chosen(known, site="device", weights="streamed", frozen_as=frozen_as)
    assert {b.site for b in made.buckets if not b.resident} == {Site.NONE}
    enough = device_bytes(chosen(known, site="device", frozen_as=frozen_as))
    assert not travels(whole := chosen(known, enough, site="device", frozen_as=frozen_as)) and not whole.codes_bytes
    small = chosen(known, enough - 1, site="device", frozen_as=frozen_as)
    assert {b.site for b in small.buckets} == {Site.NONE, Site.DEVICE}
    assert travels(small) and device_bytes(small) < enough and bool(small.codes_bytes) is bool(frozen_as)


# Forced options


@pytest.mark.parametrize("site", ["device", "host", "streamed"])
@pytest.mark.parametrize(("weights", "gradients"), [("resident", "host"), ("streamed", "device"), ("streamed", "host")])
def test_forced_options_hold_for_every_bucket(site: Any, weights: Any, gradients: Any) -> None:
    known = transformer(groups=False, accumulation=2)
    made = chosen(known, site=site, weights=weights, gradients=gradients)
    assert {b.site for b in made.buckets} == {Site(site)}
    assert {b.resident for b in made.buckets[1:-1]} == {weights == "resident"}
    grad_tier = HOST if gradients == "host" and site != "device" else DEVICE
    assert {b.grad_tier for b in made.buckets} == {grad_tier}
    assert validate(made, place(made), known.params) == []


def test_weights_told_to_travel_leave_although_their_state_stays() -> None:
    places = Places(transformer(groups=False), request(site="device", weights="streamed"))
    assert places.offloadable(places.ladder()[0]) == places.blocks != []


def test_travelling_weights_alone_take_their_state_with_them() -> None:
    made = chosen(transformer(groups=False), weights="streamed")
    assert [b.site for b in made.buckets] == [Site.DEVICE, *4 * [Site.HOST], Site.DEVICE]


def test_state_that_visits_parks_its_gradients_when_it_must() -> None:
    known = transformer(groups=False)
    roomy = chosen(known, site="streamed", weights="resident")
    assert {b.grad_tier for b in roomy.buckets} == {DEVICE}
    tight = chosen(known, device_bytes(roomy) - 1, site="streamed", weights="resident")
    assert HOST in {b.grad_tier for b in tight.buckets}


# Refusals


def refusal(known: Facts, *budgets: int, **changes: Any) -> str:
    with pytest.raises(Refusal) as caught:
        choose(known, request(*budgets, **changes), 1000)
    return str(caught.value)


def test_a_device_that_is_too_small() -> None:
    known = transformer(groups=False)
    text = refusal(known, 100_000)
    assert text.startswith("strategies.offload.gpu_memory = 100000: ")
    assert text.endswith(" or more, or a smaller training.per_device_train_batch_size")
    least = parse_bytes(text.split("write ")[1].split(" or more")[0])
    assert set(travels(choose(known, request(least), 1000))) >= {"embedding", "layers.0/0", "layers.0/1", "head"}
    assert "1000 B of them for forward and backward" in text
    assert refusal(known, 100_000, site="device").endswith(", or leave strategies.offload.site at auto")


def test_where_memory_is_scarce_a_head_of_many_words_has_no_slot_for_its_gradient() -> None:
    known = transformer(words=2000, groups=False)
    least = parse_bytes(refusal(known, 1000).split("write ")[1].split(" or more")[0])
    tight = chosen(known, least, saved=1000)
    assert [b.name for b in tight.buckets if b.grad_direct] == ["embedding", "head"]
    slots = [pool for pool in slot_pools(tight) if pool.item is Item.GRAD]
    head, block = 4 * (64 * 2000 + 128), 4 * 8 * 64 * 64  # with its norm, and the larger part of a block
    assert [(pool.num_slots, pool.slot_bytes) for pool in slots] == [(3, block)]
    assert device_bytes(tight) == head + 3 * block
    assert not any(b.grad_direct for b in chosen(known, 3 * least).buckets)
    shared = replace(known, run=replace(known.run, world_size=2))
    text = refusal(shared, 1000)
    over_ranks = chosen(shared, parse_bytes(text.split("write ")[1].split(" or more")[0]), saved=1000)
    assert not any(b.grad_direct for b in over_ranks.buckets)


@pytest.mark.parametrize(("blocks", "words", "room"), [(16, 3100, 2_173_244), (8, 2000, 1_612_912)])
def test_room_is_used_although_the_first_schedules_cannot_be_packed(blocks: int, words: int, room: int) -> None:
    """The last resort, every weight at the last moment, would take a third of the room, and much more time."""
    known = transformer(blocks, words=words, groups=False)
    placements = Places(known, request(site="host"))
    last = placements.ladder()[-1]
    indices = list(placements.offloadable(last))
    layout = placements.layout(last)
    made = fitted(layout, alone(known, layout, indices), room, None)
    stays = sum(aligned(made.buckets[index].weight_bytes) for index in indices if made.buckets[index].resident)
    assert 0.85 * room < weight_packing(made).arena + stays <= room


def fits(known: Facts, saved: int, device_bytes: int, host_bytes: int, **asked: Any) -> bool:
    try:
        choose(known, request(device_bytes, host_bytes, **asked), saved)
    except Refusal:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(random_facts(), st.integers(1, 300_000), st.integers(1, 600_000), st.booleans())
def test_a_refusal_is_true_and_its_advice_is_enough(known: Facts, device: int, host: int, knows_rates: bool) -> None:
    """Nothing that the options leave open would have fitted, and what the message says to write does."""
    saved = sum(unit.saved_bytes for unit in known.units)
    machine = replace(known.machine, rates=ASSUMED if knows_rates else None)
    known = replace(known, machine=machine, run=replace(known.run, forward_flops=10**9))
    try:
        made = choose(known, request(device, host), saved)
    except Refusal as refused:
        text = str(refused)
    else:
        addresses = place(made)
        assert addresses.num_bytes(DEVICE) + saved <= device and addresses.num_bytes(HOST) <= host
        return
    for site in ("device", "host", "streamed"):
        assert not fits(known, saved, device, host, site=site)
    block = block_bytes(known)
    for part in (1, 2, 3, 4, 6, 8) if block else ():
        assert not fits(known, saved, device, host, bucket_bytes=-(-block // part))
    enough = parse_bytes(text.split("write ")[1].split(" or more")[0])
    if "host_memory = " in text.split(": ")[0]:
        assert fits(known, saved, device, enough)
        if "or strategies.offload.gpu_memory: " in text:
            assert fits(known, saved, parse_bytes(text.split("gpu_memory: ")[1].split(",")[0]), host)
    else:
        also = parse_bytes(text.split("host_memory: ")[1].split(" too")[0]) if "too small as well" in text else host
        assert fits(known, saved, enough, also)


def test_what_takes_the_least_of_both_sides_is_not_refused() -> None:
    known = transformer(60, dtype="bfloat16")
    asked: dict[str, Any] = {"site": "host", "weights": "streamed", "shards": 4}
    least = every_budget(known, gradients="device", bucket_bytes=2 * 14 * 64 * 64, **asked)[-1]
    addresses = place(least)
    assert fits(known, 0, addresses.num_bytes(DEVICE), addresses.num_bytes(HOST), **asked)


def test_over_ranks_updates_that_stream_nothing_are_simulated_too() -> None:
    """The estimate promises more of streaming there than its waiting lets it keep."""
    rates = replace(ASSUMED, dram_bytes_per_s=ASSUMED.dram_bytes_per_s / 4)
    known = transformer(6, 256, dtype="bfloat16")
    run = replace(known.run, forward_flops=5 * 10**8, world_size=8)
    known = replace(known, machine=replace(known.machine, rates=rates), run=run)
    budget = 3 * sum(param.num_elements for param in known.params)

    def seconds(site: Any) -> float:
        asked = request(budget, shards=8, splits_gradients=True, site=site)
        return cost_of(known, choose(known, asked), rates).seconds

    assert seconds("auto") <= seconds("host") < seconds("streamed")


# Any model, any options

options = st.fixed_dictionaries(
    {
        "site": st.sampled_from(["auto", "auto", "device", "host", "streamed"]),
        "weights": st.sampled_from(["auto", "auto", "resident", "streamed"]),
        "gradients": st.sampled_from(["auto", "auto", "device", "host"]),
        "bucket_bytes": st.none() | st.integers(1024, 40_000),
        "prefetch": st.none() | st.integers(0, 3),
        "shards": st.sampled_from([1, 1, 2, 3]),
        "splits_gradients": st.booleans(),
        "reduction": st.sampled_from(["exact", "fast"]),
    }
)


@settings(max_examples=5, deadline=None)
@given(random_facts(), options, st.integers(1, 400_000), st.booleans())
def test_what_is_chosen_is_valid_and_within_the_budget(
    known: Facts, asked: dict[str, Any], budget: int, knows_rates: bool
) -> None:
    saved = sum(unit.saved_bytes for unit in known.units)
    machine = replace(known.machine, rates=ASSUMED if knows_rates else None)
    known = replace(known, machine=machine, run=replace(known.run, forward_flops=10**9))
    try:
        made = choose(known, request(budget, **asked), saved)
    except Refusal as refused:
        least = parse_bytes(str(refused).split("write ")[1].split(" or more")[0])
        assert budget < least
        made, budget = choose(known, request(least, **asked), saved), least
    addresses = place(made)
    assert validate(made, addresses, known.params) == []
    assert addresses.num_bytes(Tier.DEVICE) + saved <= budget
    for b in made.buckets:
        assert b.site is not Site.DEVICE or b.resident or (asked["site"], asked["weights"]) == ("device", "streamed")
    assert made == choose(known, request(budget, **asked), saved)


def test_the_disk_has_no_state_that_the_host_has_room_for() -> None:
    known, disk = transformer(words=2000, groups=False), {"site": "host", "disk": ("/fast",), "disk_bytes": PLENTY}
    for made in every_budget(known, **disk):
        assert not any(bucket.on_disk for bucket in made.buckets), device_bytes(made)
    tight = request(device_bytes(made), place(made).num_bytes(HOST) - 1, **disk)
    assert 0 < sum(bucket.on_disk for bucket in choose(known, tight).buckets) < 6
