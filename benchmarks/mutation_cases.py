"""Cases for ``mutations.py``: programs that train plainly and with the engine, each with one lane slowed down in turn.

A program trains on the grid below, runs a script (``mutation_scripts``), sends saved tensors to the host, or reduces
gradients over two ranks, one of them made up. A case passes if the program returns the same bits as plain training on
the same device. The models are small, so that many cases cost little.
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
from torch.utils._pytree import tree_map_only

from benchmarks.mutation_scripts import LAYOUTS, SCRIPTS, TIMES, closes, on_and_off
from benchmarks.slow_lanes import DEVICE, LANES, Slow, quickly, slowly
from strategies.engine import AdamW, stow
from strategies.engine.transfer.race_detector import RaceDetector
from strategies.engine.transfer.transfer import Lane, Transfer
from tests.helpers import engine as loops
from tests.helpers import sides
from tests.helpers.grid import FORBIDDEN, NORMS
from tests.helpers.models import Odd, Spec, build, odd_batches, tokens
from tests.helpers.pairwise import Row, Table

STEPS = 4


@dataclass(frozen=True, slots=True)
class Program:
    """Something that is done plainly and with the engine; both must return the same.

    ``key`` says what plain training depends on; ``stowed`` takes the transfer and the device; ``times`` and ``also``
    say how slow lanes are, and which are slow in every case.
    """

    key: tuple[object, ...]
    plain: Callable[[], Any]
    stowed: Callable[[Transfer, str], Any]
    times: int = TIMES
    also: tuple[Lane, ...] = ()


# --- the grid --------------------------------------------------------------------------------------------------------

ROWS = Table(
    {
        "model": ("blocks", "shared", "experts"),
        "site": ("host", "streamed", "mixed", "device"),
        "weights": ("travelling", "some", "resident"),
        "bucket": ("one", "several", "half"),
        "park": ("host", "device"),
        "clip": ("in-backward", "off", "tight", "loose"),
        "accumulation": (1, 3),
        "recompute": (False, True),
        "prefetch": (2, 0, 1, 5),
        "dtype": ("float32", "bfloat16"),
        "looks": (False, True),  # the host waits for compute at each forward; else it runs ahead to the end
        "slow": tuple(LANES),
    },
    FORBIDDEN,
    strength=3,
)
SPECS = {
    "two": Spec(width=16, hidden=(24, 16), calls=(0, 1)),  # only its blocks train: each bucket has a slot of its own
    "few": Spec(width=16, hidden=(24, 16), calls=(0, 1)),
    "blocks": Spec(width=16, hidden=(24, 16, 32, 24, 16, 8), calls=(0, 1, 2, 3, 4, 5)),
    "shared": Spec(width=12, hidden=(8, 10, 12, 16), calls=(0, 1, 2, 1, 3, 0), shares=(2, 1), on_root=True, frozen=2),
}


def made(kind: str, dtype: str = "float32", recompute: bool = False) -> nn.Module:
    """A model, with the same weights each time."""
    torch.manual_seed(0)
    model: Any
    if kind == "experts":
        model = build("experts")
        model.recompute = {"use_reentrant": False} if recompute else None
    else:
        model = Odd(replace(SPECS[kind], recompute=int(recompute)))
        model.embed.requires_grad_(kind != "two")
    trained: nn.Module = model.to(getattr(torch, dtype)).train()
    return trained


def on_grid(row: Row) -> Program:
    """Ordinary training."""
    case: Mapping[str, Any] = row
    loop: dict[str, Any] = {"accumulation": case["accumulation"], "max_norm": NORMS[case["clip"]]}
    model = partial(made, case["model"], case["dtype"], case["recompute"])
    where = {name: case[name] for name in ("site", "weights", "bucket", "park", "prefetch")}
    plan = loops.plan_of(model(), in_backward=case["clip"] == "in-backward", **where, **loop)

    def batches(device: str) -> list[dict[str, Tensor]]:
        count = STEPS * case["accumulation"]
        found = tokens("experts", count) if case["model"] == "experts" else odd_batches(count)
        return [{name: value.to(device) for name, value in batch.items()} for batch in found]

    def plain() -> Any:
        return _values(loops.plain(model().to(DEVICE), batches(DEVICE), **loop))

    def stowed(moves: Transfer, device: str) -> Any:
        there = model()
        if case["looks"]:
            there.register_forward_pre_hook(lambda *_: torch.accelerator.current_stream().synchronize())
        return _values(loops.stowed(there, plan, batches(device), transfer=moves, device=device, **loop))

    key = tuple(row[name] for name in ("model", "clip", "accumulation", "recompute", "dtype"))
    return Program(("grid", *key), plain, stowed, times=1)


def _values(found: loops.Result) -> list[Any]:
    return [found.losses, found.norms, found.tensors]


# --- scripts ---------------------------------------------------------------------------------------------------------


def scripted(name: str, layout: str) -> Program:
    """A script under a layout."""
    script = SCRIPTS[name]

    def seen(model: nn.Module, optimizer: Any) -> list[Any]:
        found = script.run(model, optimizer)
        return [found] if script.run is closes else [found, sides.everything(model, optimizer)]

    def plain() -> list[Any]:
        sides.ground.device = torch.device(DEVICE)
        model = sides.ground.put(made(script.model))
        optimizer = sides.Plain(model, script.max_norm)
        for group in optimizer.param_groups:
            group["fused"] = script.fused
        return seen(model, optimizer)

    def stowed(moves: Transfer, device: str) -> list[Any]:
        options: dict[str, Any] = {**LAYOUTS[layout], **script.layout, "fused": script.fused}
        options |= {"max_norm": script.max_norm, "accumulation": script.accumulation}
        model, optimizer = _stowed(moves, device, script.model, **options)
        found = seen(model, optimizer)
        optimizer.close()
        return found

    return Program(("script", name), plain, stowed, script.times)


def _stowed(
    moves: Transfer,
    device: str,
    kind: str,
    *,
    dtype: str = "float32",
    group: Any = None,
    fused: bool = True,
    **layout: Any,
) -> tuple[nn.Module, Any]:
    sides.ground.device = torch.device(device)
    model = made(kind, dtype)
    plan: Any = loops.plan_of(model, **layout)
    if group is not None:
        plan = replace(plan, facts=SimpleNamespace(run=SimpleNamespace(world_size=2)))
    rule = AdamW(lr=loops.LR, weight_decay=loops.DECAY, fused=fused)
    given: dict[str, Any] = {"device": device, "transfer": moves, "process_group": group, "beside": True}
    return model, stow(sides.ground.feed(model), plan, rule=rule, **given)


# --- ranks -----------------------------------------------------------------------------------------------------------

OTHERS: Mapping[str, tuple[str, float | None]] = {  # dtype, and the other rank's gradients; None: the same as ours
    "alike": ("float32", None),
    "another": ("float32", 0.5),
    "another, bf16": ("bfloat16", 0.5),
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
    ):  # fmt: skip
        yield object()


def ranked(site: str, name: str) -> Program:
    """Blocks that only some steps of this rank use, and the other rank perhaps in all; compared with updates on the
    device. The worker is slow in every case: an update that forward did not need must be in time for the gradient of
    the other rank."""
    dtype, other = OTHERS[name]

    def run(moves: Transfer, device: str, **layout: Any) -> list[Any]:
        with two(other) as group:
            model, optimizer = _stowed(moves, device, "blocks", dtype=dtype, group=group, max_norm=0.5, **layout)
            found = [on_and_off(model, optimizer), sides.everything(model, optimizer)]
            optimizer.close()
        return found

    def plain() -> list[Any]:
        slowly("all", 0)
        return run(Slow(), DEVICE, site="device")

    def stowed(moves: Transfer, device: str) -> list[Any]:
        resident = (site == "host" and other is not None) or device == "cpu"
        return run(moves, device, site=site, **({} if resident else {"weights": "travelling", "prefetch": 1}))

    return Program(("ranks", name), plain, stowed, also=(Lane.HOST,))


# --- saved tensors on the host ---------------------------------------------------------------------------------------

LOOPS = ("retained", "two_forwards", "half", "abandoned", "evaluated", "partly", "of_any_length")


class Layer(nn.Module):
    """Two products. Nothing is drawn at random, because the host waits for kernels that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x))).transpose(0, 1).tanh().transpose(0, 1)


def saved(loop: str) -> Program:
    """What people do with graphs: a loop of ``tests/parity/test_activations.py``."""

    def run(moves: Transfer | None, device: str) -> list[Tensor]:
        from tests.parity import test_activations as tests  # starts threads, so not before the fork

        tests.rows = lambda number: torch.randn(number, 6).to(device).requires_grad_()
        with mock.patch.object(tests, "Layer", Layer):
            model = tests.Stack(6).to(device)
        if moves is not None:
            hook = model.register_forward_pre_hook(lambda module, given: given[0].to(device))
            tests.hosting(model, transfer=moves)
            hook.remove()
        torch.manual_seed(4)
        for _ in range(3):
            getattr(tests, loop)(model)
        return tests.grads(model)

    return Program(("saved", loop), partial(run, None, DEVICE), run, times=4)


# --- all of them -----------------------------------------------------------------------------------------------------

Known = Mapping[tuple[object, ...], Any]  # what plain training returns, by the key of programs
# The race detector does not know that who awaits the worker's result has waited for what the worker waited for.
UNWATCHED = ("closes", "skips", "infinite", "infinite, unclipped", "infinite, unfused")


@dataclass(frozen=True, slots=True)
class Case:
    """A program on the simulated device while ``lane`` is slow, or, if that is None, on the CPU under the race
    detector."""

    program: Program
    lane: str | None

    def __call__(self, known: Known) -> str:
        """What is wrong; empty if all is well."""
        slowly(self.lane or "all", self.program.times, self.program.also)
        if self.lane is not None:
            found = self.program.stowed(Slow(), DEVICE)
            torch.accelerator.synchronize()
            where = sides._first_difference(known[self.program.key], found)
            return f"differs at {where}" if where is not None else ""
        detector = RaceDetector()
        try:
            self.program.stowed(detector, "cpu")
        except AssertionError:
            if not detector.races:
                raise
        return str(detector.races[0]) if detector.races else ""


def cases(quick: bool = False) -> dict[str, Case]:
    """All cases by name; the names of those under the race detector begin with "order"."""
    found: dict[str, Case] = {}

    def add(name: str, program: Program, lanes: Iterable[str] = LANES, *, ordered: bool = True) -> None:
        found.update({f"{name}, slow: {lane}": Case(program, lane) for lane in lanes})
        if ordered:
            found[f"order, {name}"] = Case(program, None)

    for number, row in enumerate(islice(ROWS.rows(), 12 if quick else None)):
        title = "-".join(level if isinstance(level, str) else f"{name}:{level}" for name, level in row.items())
        add(f"grid {number}: {title}", on_grid(row), [str(row["slow"])], ordered=number % 3 == 0)
    if quick:
        return found
    for loop in LOOPS:
        add(f"saved tensors, {loop}", saved(loop))
    for site, other in product(("host", "streamed", "device"), OTHERS):
        add(f"ranks, {site}, {other}", ranked(site, other), ordered=site != "device")
    for number, (name, layout) in enumerate(product(SCRIPTS, LAYOUTS)):
        lanes = list(LANES)[(number + number // len(LAYOUTS)) % 2 :: 2]
        add(f"{name}, {layout}", scripted(name, layout), lanes, ordered=number % 2 == 1 and name not in UNWATCHED)
    return found


def expected(some: Iterable[Case]) -> dict[tuple[object, ...], Any]:
    """What plain training returns for the programs of these cases, on the host."""
    found: dict[tuple[object, ...], Any] = {}
    for program in (case.program for case in some):
        if program.key not in found:
            quickly()
            result = program.plain()
            found[program.key] = tree_map_only(Tensor, lambda value: value.detach().cpu(), result)
    return found
