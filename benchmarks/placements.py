"""Simulated, not measured: how far our placements are from the best that a long search finds.

    python benchmarks/placements.py --seeds 0-199 --out FOLDER
    python benchmarks/placements.py --seeds 0-15 --ranks 4 --common-host --out ...
    python benchmarks/placements.py --known benchmarks/records/placements.jsonl --out ...

Random models of four families (uniform blocks, uneven ones, one giant block, experts in every other block) on four
machines (an H100, a 4090, its link or its CPU slower), with budgets from 15 to 80 % of what would stay on the device.
The best known is the least of what hill climbs find, from four starts each: every bucket's place and every exchange of
two, first all buckets of a block together and then single ones, accepted by the simulator. With at most six buckets
that have a choice it is the optimum of all placements instead. With ``--known`` it is that of a record.

With ``--ranks`` that many ranks of one machine share each bucket, as ZeRO 3 does, and its CPU and memory: each has its
part of the budget. They exchange parts of weights over the network, or copy them out of each other's host memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import inf
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.strategies.core.facts import Facts, MachineFacts, Param, Precision, Rates, RunFacts, Unit, UnitKind
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.planner.placement_search import PlacementSearch
from deepstow.strategies.planner.places import OffloadRequest, Placement, Places
from deepstow.strategies.planner.site_search import SiteSearch
from deepstow.strategies.report.table import table
from deepstow.trainer.machine.profiles import profile

FAMILIES = ("uniform", "uneven", "giant", "experts")
MACHINES = ("h100", "4090", "slow cpu", "slow link")
WORDS = 32_000
EXHAUSTIVE = 6  # buckets of which all placements are simulated
MORE = 1.1  # times what is needed, where the budget is less
CLIMB = 300  # placements of one climb, and half as many of single buckets
PART = (1, 1, 1, 1, 2.7, 2.7, 2.7)  # of a block's matrices, in squares of the width


def rates_of(machine: str) -> Rates:
    """The rates of one of ``MACHINES``."""
    rates = profile("h100-pcie5" if machine == "h100" else "rtx4090-pcie4").rates
    assert rates is not None
    fp32, bf16 = rates.update_fp32_params_per_s, rates.update_bf16_params_per_s
    if machine == "slow cpu":
        return replace(rates, update_fp32_params_per_s=fp32 / 5, update_bf16_params_per_s=bf16 / 5)
    if machine == "slow link":
        return replace(rates, up_bytes_per_s=rates.up_bytes_per_s / 4, down_bytes_per_s=rates.down_bytes_per_s / 4)
    return rates


def instance(
    seed: int, blocks: tuple[int, int] = (6, 16), ranks: int = 1, *, common_host: bool = False
) -> tuple[str, Facts, OffloadRequest]:
    """A name, a model on a machine, and a budget. The model and the machine are the same for all numbers of ranks."""
    random = Random(f"placement {seed}")
    family, machine = FAMILIES[seed % 4], MACHINES[seed // 4 % 4]
    count, width = random.randint(*blocks), random.choice([2048, 4096])
    tokens = random.choice([1024, 2048, 4096, 8192])
    ends = WORDS * width
    params, active = [Param("tokens", "embedding", ends, "bfloat16", 0, looked_up=True)], 0.0
    for index in range(count):
        uneven, odd = random.uniform(0.4, 2) if family == "uneven" else 1.0, index % 2 == 1
        giant = 6.0 if family == "giant" and index == count // 3 else 1.0
        scale = 4.0 if family == "experts" and odd else uneven * giant
        sizes = [width * max(1, round(share * scale * width)) for share in PART] + [2 * width]
        block = f"layers.{index}"
        params += [Param(f"{block}.{number}", block, size, "bfloat16", 0) for number, size in enumerate(sizes)]
        active += sum(sizes) / (4 if family == "experts" and odd else 1)
    params.append(Param("head.output", "head", ends, "bfloat16", 0))
    clip = random.choice([1.0, 1.0, 0.0])
    run = RunFacts(
        micro_batch=1,
        sequence=tokens,
        accumulation=random.choice([1, 1, 2]),
        max_grad_norm=clip,
        precision=Precision.BF16,
        world_size=ranks,
        forward_flops=int(2 * (active + ends) * tokens),
        recomputes=random.random() < 0.5,
    )
    units = [Unit("embedding", UnitKind.EMBEDDING, ends, ends)]
    for index in range(count):
        size = sum(param.num_elements for param in params if param.unit == f"layers.{index}")
        units.append(Unit(f"layers.{index}", UnitKind.BLOCK, size, size))
    units.append(Unit("head", UnitKind.HEAD, ends, ends))
    facts = Facts(
        tuple(units),
        run,
        MachineFacts("placements", 1 << 40, 1 << 50, rates=rates_of(machine).shared_by(ranks), ranks=ranks),
        tuple(params),
    )
    budget = int(random.uniform(0.15, 0.8) * 16 * sum(param.num_elements for param in params)) // ranks
    request = OffloadRequest(
        device_bytes=budget,
        host_bytes=1 << 50,
        gpu_memory=budget,
        host_memory="1PiB",
        in_backward=ranks == 1 and clip == 0,
        shards=ranks,
        splits_gradients=ranks > 1,
        gradients="device" if ranks > 1 and run.accumulation > 1 else "auto",
        common_host=common_host,
    )
    return f"{family}, {machine}, {count} blocks", facts, request


def best_known(search: SiteSearch, room: int, ours: Placement | None, random: Random, climb: int = CLIMB) -> float:
    """Seconds of the best placement of the search's buckets that is known."""
    places = search.places
    seconds_of: dict[Placement, float] = {}

    def seconds(placement: Placement) -> float:
        if placement not in seconds_of:
            timed = search.timed(placement, room)
            seconds_of[placement] = timed.seconds if timed is not None else inf
        return seconds_of[placement]

    if sum(len(choices) > 1 for choices in places.choices) <= EXHAUSTIVE:
        return min(map(seconds, product(*places.choices)))
    ladder = places.ladder()
    starts = [min(ladder, key=seconds), ladder[-1], places.streamed(ladder[-1]), *([ours] if ours else [])]
    for start in (start for start in starts if seconds(start) < inf):
        for whole, most in ((True, climb), (False, climb // 2)):
            start = _climbed(places, start, seconds, _groups(places, whole=whole), most, random)
    return min(seconds_of.values())


def _groups(places: Places, *, whole: bool) -> list[list[int]]:
    """Buckets that move together: all of the same units, or each one by itself."""
    groups: dict[object, list[int]] = {}
    for index, bucket in enumerate(places.buckets):
        if len(places.choices[index]) > 1:
            groups.setdefault(bucket.units if whole else index, []).append(index)
    return list(groups.values())


def _climbed(
    places: Places,
    placement: Placement,
    seconds: Callable[[Placement], float],
    groups: list[list[int]],
    most: int,
    random: Random,
) -> Placement:
    """The placement that no move makes faster, or the best of ``most``; moves come in a new random order each round."""
    kinds = list(dict.fromkeys(kind for choices in places.choices for kind in choices))
    moves = [*product(range(len(groups)), kinds), *combinations(range(len(groups)), 2)]
    tried, improved = 0, True
    while improved:
        improved = False
        for first, second in random.sample(moves, len(moves)):
            draft = list(placement)
            to = placement[groups[second][0]] if isinstance(second, int) else second
            other_to = placement[groups[first][0]] if isinstance(second, int) else to
            for group, place in ((groups[first], to), (groups[second] if isinstance(second, int) else [], other_to)):
                for index in group:
                    draft[index] = place if place in places.choices[index] else draft[index]
            moved, tried = tuple(draft), tried + 1
            if seconds(moved) < seconds(placement) * (1 - 1e-6):
                placement, improved = moved, True
            if tried >= most:
                return placement
    return placement


def case(seed: int, ranks: int = 1, *, common_host: bool = False, known: float | None = None) -> dict[str, object]:
    """One instance: our plan and the best known, which is searched for if it is not given."""
    name, facts, request = instance(seed, ranks=ranks, common_host=common_host)
    began = time.process_time()
    try:
        layout = PlacementSearch(facts, request, saved_bytes=0).best()
    except MemoryRefusal as refusal:  # slots are not divided over ranks
        request = replace(request, device_bytes=int(MORE * refusal.needed))
        began = time.process_time()
        layout = PlacementSearch(facts, request, saved_bytes=0).best()
    took = time.process_time() - began
    usual = SiteSearch(facts, request, Places(facts, request), request.host_bytes)
    start = None
    if [bucket.name for bucket in layout.buckets] == [bucket.name for bucket in usual.places.buckets]:
        start = tuple(
            next(place for place in choices if (place.site, place.grad_tier) == (bucket.site, bucket.grad_tier))
            for bucket, choices in zip(layout.buckets, usual.places.choices, strict=True)
        )
    seconds = usual.seconds(layout)
    if known is None:
        known = best_known(usual, request.device_bytes, start, Random(seed))
    return {"seed": seed, "name": name, "ours": seconds, "best_known": min(seconds, known), "cpu_s": took}


def lines(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The table, by family and by machine."""
    rows = []
    for kind in (*FAMILIES, *MACHINES, "all"):
        ratios = [row["ours"] / row["best_known"] for row in cases if kind in row["name"] or kind == "all"]
        if ratios:
            over = sum(ratio > 1.05 for ratio in ratios)
            rows.append([kind, f"{len(ratios)}", f"{sum(ratios) / len(ratios):.3f}", f"{max(ratios):.3f}", f"{over}"])
    return table(("instances of", "number", "mean of ours / best known", "worst", "over 1.05"), rows, markdown=True)


def main() -> None:
    """Write ``cases.jsonl`` after each case and ``table.md`` after the last one, with progress."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0-199", help="first and last seed")
    parser.add_argument("--ranks", type=int, default=1, help="that share each bucket, on one machine")
    parser.add_argument("--common-host", action="store_true", help="they read weights out of each other's host memory")
    parser.add_argument("--known", type=Path, help="a record's cases, of the same ranks, whose best known is taken")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    first, last = map(int, given.seeds.split("-"))
    given.out.mkdir(parents=True, exist_ok=True)
    recorded = map(json.loads, given.known.read_text().splitlines()) if given.known else ()
    known = {row["seed"]: row["best_known"] for row in recorded}
    cases = []
    for seed in range(first, last + 1):
        cases.append(case(seed, given.ranks, common_host=given.common_host, known=known.get(seed)))
        print(json.dumps(cases[-1]), flush=True)
        with (given.out / "cases.jsonl").open("a") as file:
            file.write(json.dumps(cases[-1]) + "\n")
    (given.out / "table.md").write_text("\n".join(lines(cases)) + "\n")


if __name__ == "__main__":
    main()
