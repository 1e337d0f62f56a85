"""The planner of degrees on random chains: the exact P2, EffTra's P1 by P2's measure, and the closed form by the clock.

    python benchmarks/hybrid_planner.py --chains 300

Chains are those of the tests (``tests/helpers/chains.py``): up to five layers on up to four ranks, in which compute,
exchanges and memory weigh about the same. Real models are more even, so real distances are smaller.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from math import inf, isclose
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strategies.planner.hybrid.chain import Chain, least_bottleneck, least_total
from strategies.planner.hybrid.pipeline_clock import StageSeconds, last_backwards, total_seconds
from tests.helpers.chains import every_plan, random_chain


def spread(values: Sequence[float]) -> str:
    """Median, mean, ninth decile and worst."""
    ordered = sorted(values)
    middle, last = ordered[len(ordered) // 2], ordered[int(0.9 * len(ordered))]
    return f"median {middle:.2f}, mean {sum(ordered) / len(ordered):.2f}, p90 {last:.2f}, worst {ordered[-1]:.2f}"


def exact(chains: Sequence[Chain]) -> str:
    """How often P2 is the best of all plans."""
    pairs = [(least_total(chain)[0], min(map(chain.total, every_plan(chain)))) for chain in chains]
    same = sum(isclose(found, best, rel_tol=1e-12) or found == best == inf for found, best in pairs)
    return f"P2 is the best of all plans: {same} of {len(pairs)}, of which {sum(best < inf for _, best in pairs)} fit"


def distances(chains: Sequence[Chain]) -> tuple[list[float], int]:
    """The step of P1's plan over the least one, where it fits, and how often it does not where another plan does."""
    ratios, misfits = [], 0
    for chain in chains:
        best = least_total(chain)[0]
        if best < inf:
            taken = chain.total(least_bottleneck(chain)[1])
            misfits += taken == inf
            ratios += [taken / best] if taken < inf else []
    return ratios, misfits


def clocked(chain: Chain) -> float | None:
    """The closed form over the clock for P2's plan, without sums of gradients; None: one stage, or none fits."""
    total, plan = least_total(chain)
    if total == inf or len(plan) == 1:
        return None
    stages = [
        StageSeconds(
            chain.seconds(x) / 3, chain.seconds(x) * 2 / 3, chain.boundary(x.last) / 2 if x != plan[-1] else 0.0
        )
        for x in plan
    ]
    return total_seconds(stages, chain.micro_batches) / last_backwards(stages, chain.micro_batches)[0]


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chains", type=int, default=300)
    count = parser.parse_args().chains
    began = time.process_time()
    with_memory = [random_chain(seed) for seed in range(count)]
    without = [random_chain(seed, memory=False) for seed in range(count)]
    print(exact(with_memory))
    bottlenecks = [
        isclose(least_bottleneck(chain)[0], min(map(chain.bottleneck, every_plan(chain))), rel_tol=1e-12)
        for chain in without
    ]
    print(f"P1 is the best of all plans by its own measure: {sum(bottlenecks)} of {count}")
    for few in (1, 2, 4, 8):
        some = [chain for chain in without if chain.micro_batches == few]
        print(f"P1's step over P2's, {few} micro-batches, no limit of memory: {spread(distances(some)[0])}")
    print(f"P1's step over P2's, no limit of memory: {spread(distances(without)[0])}")
    ratios, misfits = distances(with_memory)
    fitting = len(ratios) + misfits
    print(f"P1's step over P2's, memory limited: {spread(ratios)}; {misfits} of {fitting} times it does not fit")
    shares = [share for chain in without if (share := clocked(chain)) is not None]
    print(f"closed form over the clock, for P2's plans of several stages: least {min(shares):.2f}, {spread(shares)}")
    print(f"{time.process_time() - began:.1f} s of CPU")


if __name__ == "__main__":
    main()
