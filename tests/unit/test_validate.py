"""The validator: accepts what the contract allows, and names every way to break it."""

from dataclasses import replace
from typing import Any

import pytest

from deepstow.strategies.core.facts import Param, Tier
from deepstow.strategies.core.layout import Addresses, Item, Layout, Site, Spot
from deepstow.strategies.core.validate import check, validate
from deepstow.strategies.planner.addresses import place
from tests.helpers.layouts import bucket, layout


def two() -> Layout:
    """Steps 0 to 7; a and c are never there together."""
    passing: dict[str, Any] = {"site": Site.HOST, "grad_tier": Tier.HOST}
    return layout(
        bucket("a", "layers.0", 100, 50, resident_ticks=((0, 2), (6, 8)), **passing),
        bucket("b", "layers.1", 100, resident_ticks=((1, 3), (5, 7)), **passing),
        bucket("c", "layers.2", 100, resident_ticks=((2, 6),), **passing),
        bucket("d", "head", 70),
        bucket("e", "head", 70, site=Site.NONE, group=None),
    )


def complaints(made: Layout, addresses: Addresses | None = None) -> str:
    return "; ".join(validate(made, addresses or place(made)))


def with_bucket(made: Layout, index: int, **changes: Any) -> Layout:
    buckets = list(made.buckets)
    buckets[index] = replace(buckets[index], **changes)
    return replace(made, buckets=tuple(buckets))


def with_spot(addresses: Addresses, key: tuple[str, Item], **changes: Any) -> Addresses:
    return replace(addresses, spots={**addresses.spots, key: replace(addresses.spots[key], **changes)})


def test_a_place_for_copy_and_gradient_is_not_enough_for_several_micro_batches() -> None:
    made = with_bucket(two(), 0, dtype="bfloat16", num_elements=512, offsets=(0, 256))
    once = place(made)
    assert validate(made, once) == [] and ("a", Item.PARKED) not in once.spots
    words = complaints(replace(made, accumulation=2), once)
    assert "parked gradient of a: has no address" in words


# One mistake each


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation": 0}, "accumulation = 0"),
        ({"grad_slots": 0}, "grad_slots = 0"),
        ({"moments": -1}, "moments = -1"),
        ({"units": ("layers.0", "layers.1", "layers.2", "head", "head")}, "unit head: 2 have this name"),
        ({"in_backward": True, "max_grad_norm": 1.0}, "updates in backward cannot clip"),
    ],
)
def test_settings(changes: dict[str, Any], words: str) -> None:
    made = two()
    assert words in complaints(replace(made, **changes), place(made))


@pytest.mark.parametrize(
    ("index", "changes", "words"),
    [
        (1, {"name": "a"}, "bucket a: 2 have this name"),
        (1, {"params": ("a.0",)}, "parameter a.0: is in 2 buckets"),
        (0, {"offsets": (0, 0)}, "a.0 overlaps what lies before it"),
        (0, {"offsets": (0, 100)}, "a.1 is not aligned"),
        (0, {"num_elements": 128}, "parameters reach beyond the end"),
        (0, {"num_elements": 257}, "its size is not aligned"),
        (0, {"shards": 0}, "has no 0 equal spans"),
        (0, {"shards": 3}, "has no 3 equal spans"),
        (0, {"sizes": (100,)}, "not equally long"),
        (0, {"dtype": "float16"}, "unknown dtype float16"),
        (0, {"units": ()}, "no unit that uses it"),
        (0, {"units": ("other",)}, "no unit other"),
        (0, {"resident_ticks": ((0, 2), (2, 8))}, "is resident from tick 2 to 8, after 2, of 8"),
        (0, {"resident_ticks": ((0, 9),)}, "is resident from tick 0 to 9, after -1, of 8"),
        (0, {"resident_ticks": ((0, 8),)}, "is never evicted"),
        (0, {"resident_ticks": ((0, 7),)}, "is away at tick 7, when layers.0 uses it"),
        (0, {"group": None}, "if, and only if"),
        (4, {"group": 0}, "if, and only if"),
        (3, {"grad_tier": Tier.HOST}, "cannot wait on the host"),
        (0, {"grad_split": True}, "ranks share gradients of one micro-batch that wait on the device"),
        (0, {"grad_split": True, "shards": 2, "site": Site.HOST}, "ranks share gradients of one micro-batch"),
        (0, {"grad_direct": True, "grad_tier": Tier.HOST, "site": Site.STREAMED}, "need a slot"),
        (0, {"grad_direct": True, "grad_tier": Tier.DEVICE, "site": Site.HOST}, "need a slot"),
        (0, {"grad_taken": True, "grad_tier": Tier.HOST, "site": Site.HOST}, "only the CPU's update in backward"),
        (0, {"rounds": True}, "only what is trained in bf16, with moments that do not rest in fp32"),
    ],
)
def test_buckets(index: int, changes: dict[str, Any], words: str) -> None:
    made = two()
    assert words in complaints(with_bucket(made, index, **changes), place(made))


def test_addresses_by_hand() -> None:
    made = two()
    right = place(made)
    weight = right.of("a", Item.WEIGHT)
    cases = {
        "weight of a: has no address": replace(
            right, spots={key: spot for key, spot in right.spots.items() if key != ("a", Item.WEIGHT)}
        ),
        "weight of a: lies on the host, not on the device": with_spot(right, ("a", Item.WEIGHT), tier=Tier.HOST),
        "weight of a: is not aligned": with_spot(right, ("a", Item.WEIGHT), offset=weight.offset + 4),
        "weight of a: has 1023 bytes, needs 1024": with_spot(right, ("a", Item.WEIGHT), num_bytes=1023),
        "weight of a: lies outside its arena": replace(
            right, arena_bytes={**right.arena_bytes, Tier.DEVICE: weight.offset}
        ),
        "moments of b: lies outside its arena": with_spot(right, ("b", Item.MOMENTS), offset=-4096),
        "weight of d overlaps": with_spot(right, ("d", Item.WEIGHT), offset=weight.offset),
        "scratch: has an address and needs none": replace(
            right, spots={**right.spots, ("", Item.SCRATCH): Spot(Tier.DEVICE, 0, 512)}
        ),
    }
    assert complaints(made, right) == ""
    for words, addresses in cases.items():
        assert words in complaints(made, addresses)


def test_weights_share_only_while_one_of_them_is_away() -> None:
    made = two()
    right = place(made)
    assert right.of("a", Item.WEIGHT).overlaps(right.of("c", Item.WEIGHT))
    longer = with_bucket(made, 0, resident_ticks=((0, 3), (6, 8)))
    assert complaints(longer, right) == "a and c share an address, and both are resident at tick 2"


def test_slots_overlap_only_from_their_first_byte() -> None:
    """The engine knows who used a slot before by its address alone."""
    sent = {"site": Site.HOST, "grad_tier": Tier.HOST}
    made = layout(*(bucket(name, f"layers.{name}", 1024, **sent) for name in "abcd"))
    right = place(made)
    slot, other = right.of("a", Item.GRAD).offset, right.of("b", Item.GRAD).offset
    assert (slot, other) == (right.of("c", Item.GRAD).offset, right.of("d", Item.GRAD).offset)
    assert complaints(made, right) == ""
    moved = with_spot(right, ("c", Item.GRAD), offset=min(slot, other) + 512)
    words = "gradient of c overlaps gradient of a, and does not begin where it does"
    assert words in complaints(made, moved)


def test_an_overlap_behind_a_long_spot_is_found() -> None:
    made = layout(*(bucket(name, f"layers.{name}", 2048) for name in "abc"))
    right = place(made)
    long = right.of("a", Item.WEIGHT)
    inside = with_spot(
        with_spot(right, ("b", Item.WEIGHT), offset=long.offset + 512), ("c", Item.WEIGHT), offset=long.offset + 1024
    )
    assert "weight of b overlaps" in complaints(made, inside)
    assert "weight of c overlaps" in complaints(made, inside)


def test_check_raises_with_all_of_it() -> None:
    made = two()
    check(made, place(made))
    broken = replace(with_bucket(made, 0, units=("other",)), moments=-1)
    with_all = r"cannot be carried out: moments = -1: must be at least 0; a: no unit other$"
    with pytest.raises(ValueError, match=with_all):
        check(broken, place(made))


# What layouts are compared with


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "other"}, "parameter other: in no bucket; parameter a.0: not of this model"),
        ({"num_elements": 101}, "parameter a.0: 100 elements instead of 101"),
        ({"dtype": "bfloat16"}, "parameter a.0: has another dtype or group than its bucket a"),
        ({"group": None}, "parameter a.0: has another dtype or group than its bucket a"),
        ({"users": ("head",)}, "a: its units are not those that use its parameters"),
    ],
)
def test_the_parameters_of_the_model(changes: dict[str, Any], words: str) -> None:
    made = two()
    params = [
        Param(name, b.units[0], size, b.dtype, b.group)
        for b in made.buckets
        for name, size in zip(b.params, b.sizes, strict=True)
    ]
    assert validate(made, place(made), params) == []
    assert validate(made, place(made), [replace(params[0], **changes), *params[1:]])[0] in words.split("; ")


def test_what_other_ranks_read_is_where_they_look() -> None:
    made = replace(two(), common_host=True)
    for index in range(3):
        made = with_bucket(made, index, shards=2, num_elements=512)
    right = place(made)
    assert complaints(made, right) == ""
    read, own = right.of("a", Item.COPY), right.of("a", Item.MOMENTS)
    beyond = with_spot(right, ("a", Item.COPY), offset=own.offset)
    assert "weight copy of a: lies outside of the memory that other ranks read" in complaints(made, beyond)
    within = with_spot(right, ("a", Item.MOMENTS), offset=read.offset)
    assert "moments of a: lies in the memory that other ranks read" in complaints(made, within)
