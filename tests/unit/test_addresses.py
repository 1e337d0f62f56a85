"""Addresses: slots for what takes turns, by size; that nothing is wasted is asked in ``test_offload.py``."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Item, Site
from deepstow.strategies.planner.addresses import Piece, max_live, pack, place, size_classes, slot_pools
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


@settings(max_examples=40, deadline=None)
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


# Packing: against its lower bound


def pieces(seed: int, number: int, steps: int = 100, most: int = 100) -> list[Piece]:
    """One range each; half of the seeds have many short ones."""
    random = Random(f"pieces {seed}")
    found = []
    for _ in range(number):
        start = random.randrange(steps)
        length = random.randint(1, steps - start) if seed % 2 else min(steps - start, 1 + int(random.expovariate(0.1)))
        found.append(Piece(random.randint(1, most), ((start, start + length),)))
    return found


def packing_errors(pieces: Sequence[Piece], offsets: Sequence[int], arena: int, align: int = 1) -> list[str]:
    """Everything wrong with ``offsets`` in an arena of so many bytes, by comparing every pair."""
    found = []
    for index, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
        if offset < 0 or offset + piece.num_bytes > arena:
            found.append(f"piece {index}: lies outside the arena")
        if offset % align:
            found.append(f"piece {index}: is not aligned")
        for other, theirs in enumerate(offsets[:index]):
            overlap = theirs < offset + piece.num_bytes and offset < theirs + pieces[other].num_bytes
            if overlap and any(a < d and c < b for a, b in piece.spans for c, d in pieces[other].spans):
                found.append(f"piece {index} overlaps piece {other}")
    return found


def test_uniform_sizes_meet_the_bound() -> None:
    for seed in range(60):
        random = Random(f"uniform {seed}")
        them = [Piece(7, piece.spans) for piece in pieces(seed, random.randint(1, 40), steps=random.randint(2, 60))]
        made = pack(tuple(them))
        assert made.arena == made.bound == max_live(them)
        assert packing_errors(them, made.offsets, made.arena, align=7) == []


def test_general_sizes_come_close_to_the_bound() -> None:
    """The bar: 200 pieces, mean 1.06 of the largest amount alive."""
    ratios = []
    for seed in range(8):
        them = pieces(seed, 200)
        made = pack(tuple(them))
        assert packing_errors(them, made.offsets, made.arena) == []
        ratios.append(made.arena / made.bound)
    assert mean(ratios) <= 1.06
    assert max(ratios) <= 1.10


def test_two_stays_have_one_address() -> None:
    """There on 0-1 and 3-4, with another on 1-3 and a third all the time."""
    them = [Piece(5, ((0, 1), (3, 4))), Piece(5, ((1, 3),)), Piece(2, ((0, 4),))]
    made = pack(tuple(them))
    assert made.arena == made.bound == 7
    assert made.offsets[0] == made.offsets[1] and pack(()).arena == pack((Piece(0, ((0, 1),)),)).arena == 0
    assert packing_errors(them, made.offsets, made.arena) == []


@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_pieces_does_not_matter(seed: int, random: Random) -> None:
    them = pieces(seed, 12, steps=10, most=9)
    mixed = random.sample(them, len(them))
    assert pack(tuple(them)).arena == pack(tuple(mixed)).arena
