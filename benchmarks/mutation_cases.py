"""Cases for ``mutations.py``: comparisons with plain training, each with one lane slowed down in turn.

A case trains on the grid below, runs a script (``mutation_scripts``), sends saved tensors to the host, or reduces
gradients over two ranks, one of them made up. It passes if the engine leaves the same bits as plain training on the
same device. The models are small, so that many cases cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.mutation_scripts import LAYOUTS, SCRIPTS, on_and_off
from benchmarks.slow_lanes import DEVICE, LANES, Slow, slowly
from strategies.engine import AdamW, stow
from strategies.engine.transfer.transfer import Lane
from tests.helpers import grid, sides
from tests.helpers.doubles import RaceDetector
from tests.helpers.engine import DECAY, LR, differences, plan_of
from tests.helpers.models import Mixture, Odd, build
from tests.helpers.pairwise import Row, Table

ROWS = Table(
    {
        "model": ("blocks", "shared", "experts"),
        **grid.ENGINE,
        "recompute": ("none", "later"),
        "prefetch": (2, 0, 1, 5),
        "dtype": (torch.float32, torch.bfloat16),
        "looks": (False, True),  # the host waits for compute at each forward; else it runs ahead to the end
        "slow": tuple(LANES),
    },
    grid.FORBIDDEN,
    strength=3,
)


def on_grid(row: Row) -> None:
    """Ordinary training."""

    def look(module: nn.Module, given: object) -> None:
        if row["looks"] and isinstance(module, Odd | Mixture):
            torch.accelerator.current_stream().synchronize()

    case: dict[str, Any] = {**row, "tied": False, "groups": 1}
    hook = register_module_forward_pre_hook(look)
    try:
        assert differences(*grid.both(case, case["dtype"], str(sides.ground.device), sides.ground.transfer())) == []
    finally:
        hook.remove()


# --- ranks -----------------------------------------------------------------------------------------------------------

OTHERS: Mapping[str, tuple[torch.dtype, float | None]] = {  # and the other rank's gradients; None: the same as ours
    "alike": (torch.float32, None),
    "another": (torch.float32, 0.5),
    "another, bf16": (torch.bfloat16, 0.5),
}


@contextmanager
def two(other: float | None) -> Iterator[Any]:
    """A process group of this rank and one that has ``other`` everywhere as its gradient, or the same as this one."""

    def reduced(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(2) if other is None else tensor.add_(other)
        elif other is not None:
            tensor.fill_(1)

    def gathered(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine, mine]

    with mock.patch.multiple(
        dist, get_world_size=lambda group=None: 2, get_global_rank=lambda group, rank: 0, all_reduce=reduced,
        broadcast=lambda *given, **named: None, all_gather_object=gathered,
        get_process_group_ranks=lambda group: [0, 1], new_group=lambda *given, **named: object(),
    ):  # fmt: skip
        yield object()


def ranked(site: str, name: str) -> None:
    """Blocks that only some steps of this rank use, and the other rank perhaps in all; compared with updates on the
    device. The worker is slow in every case: an update that forward did not need must be in time for the gradient of
    the other rank."""
    dtype, other = OTHERS[name]

    def run(**layout: Any) -> list[Any]:
        model = build("blocks", dtype=dtype)
        plan: Any = plan_of(model, max_norm=0.5, **layout)
        plan = replace(plan, facts=SimpleNamespace(run=SimpleNamespace(replicas=2), units=()))
        rule, ground = AdamW(lr=LR, weight_decay=DECAY), sides.ground
        given: dict[str, Any] = {"device": ground.device, "transfer": ground.transfer(), "beside": True}
        with two(other) as group:
            optimizer = stow(ground.feed(model), plan, rule=rule, process_group=group, **given)
            found = [on_and_off(model, optimizer), sides.everything(model, optimizer)]
            optimizer.close()
        return found

    with mock.patch.object(Slow, "times", 0):
        expected = run(site="device")
    resident = (site == "host" and other is not None) or sides.ground.device.type == "cpu"
    found = run(site=site, **({} if resident else {"weights": "travelling", "prefetch": 1}))
    where = sides.first_difference(expected, found)
    assert where is None, where


# --- saved tensors on the host ---------------------------------------------------------------------------------------

LOOPS = ("retained", "two_forwards", "half", "abandoned", "evaluated", "partly", "of_any_length")


def saved(loop: str) -> None:
    """What people do with graphs: a loop of ``tests/parity/test_activations.py``."""
    from tests.parity import test_activations as tests  # starts threads, so not before the fork

    device, grads = sides.ground.device, []
    tests.rows = lambda number: torch.randn(number, 6).to(device).requires_grad_()
    with mock.patch.object(nn.functional, "dropout", lambda x, p: x):  # the host waits for kernels that draw
        for hosted in (False, True):
            model = tests.Stack(6).to(device)
            if hosted:
                hook = model.register_forward_pre_hook(lambda module, given: given[0].to(device))
                tests.hosting(model, transfer=sides.ground.transfer())
                hook.remove()
            torch.manual_seed(4)
            for _ in range(3):
                getattr(tests, loop)(model)
            grads.append(tests.grads(model))
    where = sides.first_difference(grads[0], grads[1])
    assert where is None, where


# --- all of them -----------------------------------------------------------------------------------------------------

TIMES = 5  # lanes are slower by this than in the cases of the grid, which have more steps
# The race detector does not know that who awaits the worker's result has waited for what the worker waited for.
UNWATCHED = ("closes", "skips", "infinite", "infinite, unclipped", "infinite, unfused")


@dataclass(frozen=True, slots=True)
class Case:
    """A comparison on the simulated device while ``lane`` is slow, or, if that is None, on the CPU under the race
    detector. ``times`` and ``also`` say how slow, and which lanes besides."""

    compare: Callable[[], object]
    lane: str | None
    times: int = 1
    also: tuple[Lane, ...] = ()

    def __call__(self) -> None:
        """Raise AssertionError, or whatever the engine raises, unless all is well."""
        detectors: list[RaceDetector] = []

        def watched() -> RaceDetector:
            detectors.append(RaceDetector())
            return detectors[-1]

        slowly(self.lane or "all", self.times, self.also)
        sides.ground.device = torch.device("cpu" if self.lane is None else DEVICE)
        sides.ground.transfer = watched if self.lane is None else Slow
        self.compare()
        torch.accelerator.synchronize()
        races = [race for detector in detectors for race in detector.races]
        assert not races, races[0]


def cases(quick: bool = False) -> dict[str, Case]:
    """All cases by name; the names of those under the race detector begin with "order"."""
    found: dict[str, Case] = {}

    def add(name: str, compare: Callable[[], object], lanes: Iterable[str] = LANES, **how: Any) -> None:
        found.update({f"{name}, slow: {lane}": Case(compare, lane, **how) for lane in lanes})

    for number, row in enumerate(islice(ROWS.rows(), 12 if quick else None)):
        name = f"grid {number}: {grid.title(row)}"
        add(name, partial(on_grid, row), [str(row["slow"])])
        if number % 3 == 0:
            found[f"order, {name}"] = Case(partial(on_grid, row), None)
    if quick:
        return found
    for loop in LOOPS:
        add(f"saved tensors, {loop}", partial(saved, loop), times=4)
        found[f"order, saved tensors, {loop}"] = Case(partial(saved, loop), None)
    for site, other in product(("host", "streamed", "device"), OTHERS):
        add(f"ranks, {site}, {other}", partial(ranked, site, other), times=TIMES, also=(Lane.HOST,))
        if site != "device":
            found[f"order, ranks, {site}, {other}"] = Case(partial(ranked, site, other), None)
    for number, (name, script) in enumerate(SCRIPTS.items()):
        halves = [partial(script, LAYOUTS[(number + half) % 2 :: 2]) for half in (0, 1)]
        for half, lane in enumerate(LANES):
            add(name, halves[half % 2], [lane], times=TIMES if name != "trains at once, two" else 4 * TIMES)
        if name not in UNWATCHED:
            found[f"order, {name}"] = Case(halves[0], None)
    return found
