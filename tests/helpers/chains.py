"""Random chains for the hybrid planner, and every plan that a chain can have."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf
from random import Random

from strategies.planner.hybrid.chain import Chain, Layer, Mode, Plan, Stage
from strategies.planner.hybrid.cluster import Cluster, Wire


def random_chain(seed: int, *, memory: bool = True, most_layers: int = 5, most_ranks: int = 4) -> Chain:
    """Up to five unlike layers on up to four ranks, where compute, exchanges and memory weigh about the same."""
    random = Random(f"chain {seed}")
    layers = tuple(
        Layer(
            forward=random.uniform(1, 5),
            backward=random.uniform(2, 10),
            weight_bytes=random.uniform(0.2, 3),
            state_bytes=random.uniform(0.5, 6),
            reduced_bytes=random.uniform(0.1, 0.8),
            saved_bytes=random.uniform(0.5, 2),
            output_bytes=random.uniform(0.1, 2),
        )
        for _ in range(random.randint(2, most_layers))
    )
    ranks = random.randint(1, most_ranks)
    per_machine = random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    cluster = Cluster(ranks, per_machine, Wire(random.uniform(0.5, 4), 0.1), Wire(random.uniform(0.1, 1), 0.2))
    budget = random.uniform(8, 25) if memory else inf
    return Chain(layers, cluster, random.choice((1, 2, 4, 8)), budget)


def every_plan(chain: Chain) -> Iterator[Plan]:
    """All plans: each way to cut the chain, to give ranks to stages, and to use them."""
    count, ranks = len(chain.layers), chain.cluster.ranks
    for stages in range(1, min(count, ranks) + 1):
        for cuts in combinations(range(1, count), stages - 1):
            ends = (0, *cuts, count)
            for given in product(range(1, ranks + 1), repeat=stages):
                if sum(given) > ranks:
                    continue
                for modes in product(*(Mode if own > 1 else (Mode.DATA,) for own in given)):
                    yield tuple(Stage(ends[at], ends[at + 1], given[at], modes[at]) for at in range(stages))


def with_wires(chain: Chain, factor: float) -> Chain:
    """The same on a network that is so many times as fast."""
    cluster = chain.cluster
    assert cluster.across is not None
    faster = (replace(wire, bytes_per_s=wire.bytes_per_s * factor) for wire in (cluster.inside, cluster.across))
    inside, across = faster
    return replace(chain, cluster=replace(cluster, inside=inside, across=across))
