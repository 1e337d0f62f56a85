"""All cases of ``mutations.py``: the grid, scripts, saved tensors, and two ranks, of which one is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.mutation_cases import (
    DEVICE,
    LANES,
    LOOPS,
    ROWS,
    Known,
    Slow,
    key_of,
    made,
    on_grid,
    plainly,
    planned,
    saved,
    slowly,
    title,
    watched,
)
from benchmarks.mutation_scripts import LAYOUTS, SCRIPTS, TIMES, on_and_off, one_script, plain_script, watched_script
from strategies.engine import AdamW, stow
from strategies.engine.transfer.race_detector import RaceDetector
from strategies.engine.transfer.transfer import Lane, Transfer
from tests.helpers import sides
from tests.helpers.engine import DECAY, LR, plan_of
from tests.helpers.pairwise import Row

# --- ranks -----------------------------------------------------------------------------------------------------------


@contextmanager
def two(other: float | None) -> Iterator[Any]:
    """A process group of this rank and another, that does the same or has this gradient everywhere."""

    def reduced(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(2) if other is None else tensor.add_(other)
        elif other is not None:
            tensor.fill_(1)

    def gathered(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine, mine]

    fakes = {
        "get_world_size": lambda group=None: 2, "get_global_rank": lambda group, rank: 0, "all_reduce": reduced,
        "broadcast": lambda *given, **named: None, "all_gather_object": gathered,
    }  # fmt: skip
    were = {name: getattr(dist, name) for name in fakes}
    for name, fake in fakes.items():
        setattr(dist, name, fake)
    try:
        yield object()
    finally:
        for name, was in were.items():
            setattr(dist, name, was)


def _on_ranks(
    site: str, dtype: str, other: float | None, moves: Transfer, device: str = DEVICE, **wishes: Any
) -> list[Any]:
    model = made({"model": "blocks", "recompute": False, "dtype": dtype})
    sides.ground.device = torch.device(device)
    plan: Any = plan_of(model, site=site, max_norm=0.5, **wishes)
    plan = replace(plan, facts=SimpleNamespace(run=SimpleNamespace(world_size=2)))
    rule = AdamW(lr=LR, weight_decay=DECAY)
    with two(other) as group:
        optimizer: Any = stow(
            sides.ground.feed(model), plan, rule=rule, device=device, transfer=moves, process_group=group, beside=True
        )
        found = [on_and_off(model, optimizer), sides.everything(model, optimizer)]
        optimizer.close()
    return found


def ranks(site: str, dtype: str, other: float | None, lane: str, known: Known) -> list[str]:
    """Blocks that only some steps use, and the other rank perhaps in all; against updates on the device.

    The worker is slow besides: what was not updated when forward went by is updated in time for another's gradient.
    """
    slowly(lane, TIMES)
    Slow.lanes = (*Slow.lanes, Lane.HOST)
    weights = {} if site == "host" and other is not None else {"weights": "travelling", "prefetch": 1}
    where = sides._first_difference(known["ranks", dtype, other], _on_ranks(site, dtype, other, Slow(), **weights))
    return [] if where is None else [where]


def watched_ranks(site: str, dtype: str, other: float | None, known: Known) -> list[str]:
    watch = RaceDetector()
    slowly("host")
    _on_ranks(site, dtype, other, watch, "cpu")
    return watch.races


OTHERS: Mapping[str, tuple[str, float | None]] = {
    "alike": ("float32", None),
    "another": ("float32", 0.5),
    "another, bf16": ("bfloat16", 0.5),
}


# --- all of them -----------------------------------------------------------------------------------------------------

# The race detector does not know that the caller of the worker's result has waited for what the worker waited for.
UNWATCHED = ("closes", "skips", "infinite", "infinite, unclipped", "infinite, unfused")
Case = Callable[[Known], list[str]]


def cases(quick: bool = False) -> dict[str, Case]:
    """By name. Those under the race detector begin with "order"."""
    found: dict[str, Case] = {}
    for number, row in enumerate(_rows(quick)):
        plan = planned(row)
        found[f"grid {number}: {title(row)}"] = partial(on_grid, row, plan)
        if number % 3 == 0:
            found[f"order, grid {number}: {title(row)}"] = partial(_without_known, watched, row, plan)
    if quick:
        return found
    for count, lane in enumerate(LANES):
        for loop in LOOPS:
            found[f"saved tensors, {loop}, slow: {lane}"] = partial(_without_known, saved, loop, lane)
        for site in ("host", "streamed", "device"):
            for other, given in OTHERS.items():
                found[f"ranks, {site}, {other}, slow: {lane}"] = partial(ranks, site, *given, lane)
        for number, (name, layout) in enumerate(product(SCRIPTS, LAYOUTS)):
            if (number + number // len(LAYOUTS) + count) % 2 == 0:
                found[f"{name}, {layout}, slow: {lane}"] = partial(one_script, name, layout, lane)
    for site, (other, given) in product(("host", "streamed"), OTHERS.items()):
        found[f"order, ranks, {site}, {other}"] = partial(watched_ranks, site, *given)
    for loop in LOOPS:
        found[f"order, saved tensors, {loop}"] = partial(_without_known, saved, loop, "all", "cpu")
    for number, (name, layout) in enumerate(product(SCRIPTS, LAYOUTS)):
        if number % 2 and name not in UNWATCHED:
            found[f"order, {name}, {layout}"] = partial(watched_script, name, layout)
    return found


def _rows(quick: bool) -> list[Row]:
    return list(ROWS.rows())[: 12 if quick else None]


def _without_known(case: Callable[..., list[str]], *given: Any) -> list[str]:
    return case(*given[:-1])


def expected(quick: bool = False) -> dict[tuple[object, ...], Any]:
    """What plain training leaves in the cases of the grid."""
    found: dict[tuple[object, ...], Any] = {}
    for row in _rows(quick):
        if key_of(row) not in found:
            found[key_of(row)] = plainly(row)
    if not quick:
        for name, script in SCRIPTS.items():
            found["script", name] = _on_cpu(plain_script(script))
        slowly("all", 0)
        for dtype, other in OTHERS.values():
            found["ranks", dtype, other] = _on_cpu(_on_ranks("device", dtype, other, Slow()))
    return found


def _on_cpu(found: list[Any]) -> list[Any]:
    copied: list[Any] = tree_map_only(Tensor, lambda value: value.detach().cpu(), found)
    return copied
