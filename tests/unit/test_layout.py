"""The layout's sizes, from the table in its docstring, and buckets formed from parameters."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepstow.strategies.core.facts import Facts, Param, Tier
from deepstow.strategies.core.layout import (
    ITEM_BYTES,
    SCRATCH_ELEMENTS,
    Item,
    Site,
    gradient_tick,
    leads,
    needs,
    scratch_bytes,
    ticks_of,
    uses,
)
from deepstow.strategies.planner.buckets import block_bytes, form
from tests.helpers.layouts import bucket, facts_of, layout, random_facts, transformer

N = 1024  # elements of the bucket below


def sizes(dtype: str, site: Site, travels: bool, grad_tier: Tier, accumulation: int = 1) -> dict[str, str]:
    """Tier and bytes per element by item; counts left out."""
    stays = ((0, 1),) if travels else ()
    group = None if site is Site.NONE else 0
    made = bucket("b", "layers.0", N, dtype=dtype, site=site, resident_ticks=stays, grad_tier=grad_tier, group=group)
    found = list(needs(made, layout(made, accumulation=accumulation)))
    assert len({need.item for need in found}) == len(found)
    return {
        need.item.name: f"{need.tier.value} {'passing ' if need.passes else ''}{need.num_bytes // N}"
        for need in found
        if need.item is not Item.STEPS
    }


DEVICE, HOST = Tier.DEVICE, Tier.HOST


def test_bytes_per_element() -> None:
    def check(*case: Any, **expected: str) -> None:
        assert sizes(*case) == expected, case

    both = {"MASTER": "host 4", "MOMENTS": "host 8"}
    check("bfloat16", Site.NONE, True, DEVICE, WEIGHT="device passing 2", COPY="host 2")
    on_device = {"WEIGHT": "device 2", "GRAD": "device 2", "MASTER": "device 4", "MOMENTS": "device 8"}
    check("bfloat16", Site.DEVICE, False, DEVICE, **on_device)
    travels = {"WEIGHT": "device passing 4", "COPY": "host 4", "GRAD": "device passing 4", "PARKED": "host 4"}
    check("float32", Site.HOST, True, HOST, **travels, MOMENTS="host 8")  # in fp32 the copy is the master
    check("float32", Site.HOST, False, DEVICE, WEIGHT="device 4", GRAD="device 4", PARKED="host 4", **both)
    visits = {"WEIGHT": "device passing 2", "COPY": "host 2", "GRAD": "device 2", "VISIT": "device passing 12"}
    check("bfloat16", Site.STREAMED, True, DEVICE, **visits, **both)


@pytest.mark.parametrize(("site", "grad_tier"), [(Site.HOST, DEVICE), (Site.STREAMED, HOST)])
def test_a_gradient_that_waits_on_the_host_takes_the_place_of_the_copy(site: Site, grad_tier: Tier) -> None:
    """In mixed precision with one micro-batch, of a weight that travels: 14 bytes per element and not 16."""

    def on_host(dtype: str, travels: bool, accumulation: int) -> dict[str, int]:
        found = sizes(dtype, site, travels, grad_tier, accumulation)
        stays = {item: size.split() for item, size in found.items() if "passing" not in size}
        return {item: int(size) for item, (home, size) in stays.items() if home == "host"}

    assert on_host("bfloat16", True, 1) == {"COPY": 2, "MASTER": 4, "MOMENTS": 8}
    assert on_host("bfloat16", True, 2) == {"COPY": 2, "PARKED": 2, "MASTER": 4, "MOMENTS": 8}
    assert on_host("bfloat16", False, 1) == {"PARKED": 2, "MASTER": 4, "MOMENTS": 8}
    assert on_host("float32", True, 1) == {"COPY": 4, "PARKED": 4, "MOMENTS": 8}


def test_counts_stand_where_the_update_is() -> None:
    for site, home in ((Site.DEVICE, DEVICE), (Site.STREAMED, DEVICE), (Site.HOST, HOST)):
        made = bucket("b", "layers.0", 10, 10, 10, site=site)
        assert [(n.tier, n.num_bytes) for n in needs(made, layout(made)) if n.item is Item.STEPS] == [(home, 512)]


def test_scratch_is_for_mixed_precision_on_the_device() -> None:
    def scratch(**changes: object) -> int:
        return scratch_bytes(layout(bucket("b", "layers.0", 300, **changes)))

    assert scratch(dtype="bfloat16") == 4 * 512
    assert scratch(dtype="bfloat16", site=Site.STREAMED) == 4 * 512
    assert scratch(dtype="bfloat16", site=Site.HOST) == 0
    assert scratch() == 0
    assert (
        scratch_bytes(layout(bucket("b", "layers.0", 5 * SCRATCH_ELEMENTS, dtype="bfloat16"))) == 4 * SCRATCH_ELEMENTS
    )


# Buckets


def test_a_block_is_a_bucket_and_small_vectors_share_one() -> None:
    made = form(transformer(blocks=3, tied=True))
    assert [(b.name, b.group, b.units) for b in made] == [
        ("embedding", 0, ("embedding", "head")),  # a tied parameter lies at its first use
        ("layers.0..2", 1, ("layers.0", "layers.1", "layers.2")),
        ("layers.0", 0, ("layers.0",)),
        ("layers.1", 0, ("layers.1",)),
        ("layers.2", 0, ("layers.2",)),
        ("head", 1, ("head",)),
    ]
    assert made[2].params == ("layers.0.attention", "layers.0.ffn")
    assert made[2].offsets == (0, 4 * 64 * 64)


def test_small_blocks_are_packed_and_large_ones_cut() -> None:
    known = transformer(blocks=4, groups=False)
    two = form(known, 2 * block_bytes(known))
    assert [b.name for b in two] == ["embedding", "layers.0..1", "layers.2..3", "head"]
    assert {b.weight_bytes for b in form(known)[1:5]} == {block_bytes(known)}
    cut = form(known, 5 * 64 * 64 * 4)
    assert [b.name for b in cut[:4]] == ["embedding", "layers.0/0", "layers.0/1", "layers.1/0"]
    assert cut[1].params == ("layers.0.norm", "layers.0.attention")


def test_names_tell_groups_dtypes_and_frozen_ones_apart() -> None:
    kinds = [("float32", 0), ("float32", None), ("bfloat16", 0), ("bfloat16", 0)]
    made = form(facts_of(*(Param(f"p{i}", "embedding", 257, dtype, group) for i, (dtype, group) in enumerate(kinds))))
    assert (made[-1].offsets, made[-1].num_elements) == ((0, 512), 1024), "aligned to 512 bytes"
    assert [b.name for b in made] == [
        "embedding:group0:float32",
        "embedding:frozen:float32",
        "embedding:group0:bfloat16",
    ]


@settings(max_examples=60, deadline=None)
@given(random_facts(), st.none() | st.integers(512, 50_000))
def test_every_bucket_keeps_the_rules(known: Facts, capacity: int | None) -> None:
    made = form(known, capacity)
    param = {p.name: p for p in known.params}
    assert sorted(name for b in made for name in b.params) == sorted(param)
    assert len({b.name for b in made}) == len(made)
    order = [p.name for p in known.params]
    firsts = [order.index(b.params[0]) for b in made]
    assert firsts == sorted(firsts)
    for b in made:
        own = [param[name] for name in b.params]
        assert {(p.dtype, p.group) for p in own} == {(b.dtype, b.group)}
        assert [order.index(name) for name in b.params] == sorted(order.index(name) for name in b.params)
        units = {p.unit for p in own}
        assert len(units) == 1 or all(unit.startswith("layers") for unit in units)
        limit = capacity or block_bytes(known, b.dtype)
        in_block = next(iter(units)).startswith("layers")
        assert len(own) == 1 or not in_block or b.num_elements * ITEM_BYTES[b.dtype] <= limit


# Steps


def test_uses_and_leads() -> None:
    units = ("a", "b", "c")  # steps 0 to 5: a b c, c b a
    assert uses(bucket("x", "b", 10), ticks_of(units)) == (1, 4)
    over_the_end = bucket("x", "a", 10, resident_ticks=((0, 1), (4, 6)))
    assert leads(over_the_end, layout(over_the_end, units=units)) == (1, 1), "it came one before backward, and stayed"
    looked_up = replace(bucket("x", "a", 10), units=("a", "c"), looked_up=True)  # an embedding tied to the head
    assert uses(looked_up, ticks_of(units)) == (0, 2, 3)
    assert gradient_tick(looked_up, ticks_of(units)) == 5
