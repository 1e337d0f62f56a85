"""Addresses: what is permanent first, rings with slots in turn, no byte more than needed."""

from hypothesis import given, settings

from strategies.core.facts import Facts, Home
from strategies.core.layout import ALIGN_BYTES, Item, Site, scratch_bytes
from strategies.planner.addresses import all_needs, arena_bytes, place, rings
from strategies.planner.rule import choose
from tests.helpers.layouts import bucket, layout, random_facts
from tests.unit.test_planner_rule import wishes


def test_permanent_spots_follow_each_other_from_zero() -> None:
    made = layout(bucket("a", "layers.0", 100), bucket("b", "layers.1", 200))
    addresses = place(made)
    spots = sorted(addresses.spots.values(), key=lambda spot: spot.offset)
    assert spots[0].offset == 0
    assert [spot.end for spot in spots[:-1]] == [spot.offset for spot in spots[1:]]
    assert addresses.device_bytes == spots[-1].end == 4 * (4 * 128 + 4 * 256) + 2 * ALIGN_BYTES
    assert addresses.host_bytes == 0


def test_members_of_a_ring_take_turns_in_slots_of_the_largest() -> None:
    sizes = (128, 512, 256, 128, 512)
    made = layout(
        *(bucket(f"b{i}", f"layers.{i}", size, site=Site.HOST, ring="blocks") for i, size in enumerate(sizes)),
        rings={"blocks": 3},
    )
    addresses = place(made)
    spots = [addresses.of(f"b{i}", Item.WEIGHT) for i in range(5)]
    start = spots[0].offset
    assert [spot.offset - start for spot in spots] == [0, 2048, 4096, 0, 2048]
    assert [spot.num_bytes for spot in spots] == [4 * size for size in sizes]
    assert addresses.device_bytes == start + 3 * 2048


def test_a_ring_has_no_more_slots_than_members() -> None:
    made = layout(bucket("a", "layers.0", 128, site=Site.HOST, ring="blocks"), rings={"blocks": 7})
    (weights, *_) = rings(all_needs(made), made)
    assert (weights.num_slots, weights.num_bytes) == (1, 512)


def test_gradients_on_their_way_down_share_slots() -> None:
    made = layout(
        *(bucket(f"b{i}", f"layers.{i}", 128, site=Site.HOST, parks=Home.HOST) for i in range(5)), accumulation=2
    )
    addresses = place(made)
    for item, home in ((Item.GRAD, Home.DEVICE), (Item.ARRIVAL, Home.HOST)):
        spots = [addresses.of(f"b{i}", item) for i in range(5)]
        assert {spot.home for spot in spots} == {home}
        assert len({spot.offset for spot in spots}) == made.grad_slots == 2


def test_scratch_comes_last() -> None:
    addresses = place(layout(bucket("a", "layers.0", 1000, dtype="bfloat16")))
    assert addresses.of("", Item.SCRATCH).end == addresses.device_bytes


@settings(max_examples=100, deadline=None)
@given(random_facts())
def test_the_size_is_known_without_placing(known: Facts) -> None:
    for asked in ({}, {"site": "host"}, {"site": "streamed", "weights": "streamed"}):
        made = choose(known, wishes(**asked), 0)
        addresses = place(made)
        total = arena_bytes(all_needs(made), made, scratch_bytes(made))
        assert total == {home: addresses.num_bytes(home) for home in Home}
        assert place(made) == addresses
