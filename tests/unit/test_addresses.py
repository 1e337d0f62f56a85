"""Addresses: slots for what takes turns, by size; that nothing is wasted is asked in ``test_offload.py``."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Item, Site
from deepstow.strategies.planner.addresses import place, size_classes, slot_pools
from tests.helpers.layouts import bucket, layout


def test_slots_for_blocks_are_not_as_large_as_the_head() -> None:
    """Three slots for eight blocks and a norm, and two larger ones for embedding and head."""
    sizes = {"embedding": 8192, **{f"layers.{i}": 1024 for i in range(8)}, "norm": 128, "head": 8192}
    passing = (bucket(n, n, size, site=Site.HOST, grad_tier=Tier.HOST) for n, size in sizes.items())
    made = layout(*passing, grad_slots=3)
    blocks = [f"layers.{i}" for i in range(8)]
    pools = [(pool.slot_bytes, pool.num_slots, [need.bucket for need in pool.members]) for pool in slot_pools(made)]
    assert pools == [(4 * 8192, 2, ["embedding", "head"]), (4 * 1024, 3, [*blocks, "norm"])]
    at = [place(made).of(name, Item.GRAD).offset for name in (*blocks, "norm", "embedding", "head")]
    assert at[:3] == at[3:6] == at[6:9] and len(set(at)) == 3 + 2


def by_enumeration(sizes: list[int], most_slots: int) -> int:
    """The fewest bytes of any grouping."""
    if not sizes:
        return 0
    first, rest = sizes[0], sizes[1:]
    return min(
        max(first, *chosen, 0) * min(most_slots, 1 + number)
        + by_enumeration([s for i, s in enumerate(rest) if i not in at], most_slots)
        for number in range(len(rest) + 1)
        for at in combinations(range(len(rest)), number)
        for chosen in [[rest[i] for i in at]]
    )


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 3), st.integers(1, 9))
def test_classes_need_the_fewest_bytes_and_one_more_costs_at_most_itself(
    sizes: list[int], most_slots: int, more: int
) -> None:
    def needed(members: list[int]) -> int:
        return sum(size * slots for size, slots in size_classes(members, most_slots))

    assert needed(sizes) == by_enumeration(sizes, most_slots)
    assert needed(sizes) <= needed([*sizes, more]) <= needed(sizes) + more


def test_scratch_comes_last() -> None:
    addresses = place(layout(bucket("a", "layers.0", 1000, dtype="bfloat16")))
    assert addresses.of("", Item.SCRATCH).end == addresses.num_bytes(Tier.DEVICE)
