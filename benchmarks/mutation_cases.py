"""Cases for ``mutations.py``: training on the simulated accelerator while one lane lags behind the others.

A case returns what differs from plain training on the same device: nothing, if no wait is missing. The models are small
and written by hand; many cases cost little, and what is waited for is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.plan import INPUT
from strategies.engine import AdamW, stow
from strategies.engine.activations import HostRoom, arena_of_saved
from strategies.engine.checkpointing import checkpoint_blocks
from strategies.engine.transfer.race_detector import RaceDetector
from strategies.engine.transfer.transfer import AcceleratorTransfer, Lane, Transfer
from strategies.engine.worker import Worker
from tests.helpers import simulated
from tests.helpers.engine import DECAY, LR, Result, differences, plain, plan_of
from tests.helpers.grid import FORBIDDEN, NORMS
from tests.helpers.models import Odd, Spec, build, odd_batches, tokens
from tests.helpers.pairwise import Row, Table

DEVICE, STEPS = "sim:0", 4
SLOW_US = {Lane.UP: 400, Lane.DOWN: 400, Lane.COMPUTE: 60, Lane.HOST: 4000}  # each piece of work takes longer by this
LANES: Mapping[str, tuple[Lane, ...]] = {"all": (), **{lane.value: (lane,) for lane in Lane}}


# --- who is slow -----------------------------------------------------------------------------------------------------


@cache
def library() -> Any:
    """The simulated device; the worker is slow where its lane is to be."""
    submit = Worker.submit

    def late(self: Worker, priority: int, work: Callable[[], Any]) -> Any:
        def later() -> Any:
            time.sleep(SLOW_US[Lane.HOST] / 1e6 if Lane.HOST in Slow.lanes else 0)
            return work()

        return submit(self, priority, later)

    Worker.submit = late  # type: ignore[method-assign, assignment]
    return simulated.load()


class Slow(AcceleratorTransfer):
    """Each lane is delayed at random, or ``lanes`` lag behind the others."""

    lanes: tuple[Lane, ...] = ()
    times = 1  # as slow as ``SLOW_US`` says

    def __init__(self) -> None:
        super().__init__(torch.device(DEVICE))
        library().delay(*((300, 100) if not self.lanes and self.times else (0, 0)))
        library().slow(0, self._us(Lane.COMPUTE))
        for lane, stream in self._streams.items():
            library().slow(stream.stream_id, self._us(lane))

    def _us(self, lane: Lane) -> int:
        return self.times * SLOW_US[lane] if lane in self.lanes else 0


def slowly(lane: str, times: int = 1) -> None:
    """For transfers that are made from now on; ``times`` 0: nothing is slow."""
    Slow.lanes, Slow.times = LANES[lane], times


def quickly() -> None:
    library().delay(0, 0)
    library().slow(0, 0)


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
        "looks": (False, True),  # reads each loss at once; else the host runs ahead to the end
        "slow": tuple(LANES),
    },
    FORBIDDEN,
    strength=3,
)
SPECS = {
    "two": Spec(width=16, hidden=(24, 16), calls=(0, 1)),  # buckets that are trained: each has a slot of its own
    "few": Spec(width=16, hidden=(24, 16), calls=(0, 1)),
    "blocks": Spec(width=16, hidden=(24, 16, 32, 24, 16, 8), calls=(0, 1, 2, 3, 4, 5)),
    "shared": Spec(width=12, hidden=(8, 10, 12, 16), calls=(0, 1, 2, 1, 3, 0), shares=(2, 1), on_root=True, frozen=2),
}


def made(case: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if case["model"] == "experts":
        model: Any = build("experts")
        model.recompute = {"use_reentrant": False} if case["recompute"] else None
    else:
        model = Odd(replace(SPECS[case["model"]], recompute=int(case["recompute"])))
        model.embed.requires_grad_(case["model"] != "two")
    trained: nn.Module = model.to(getattr(torch, case["dtype"])).train()
    return trained


def planned(case: Mapping[str, Any]) -> Any:
    where = {name: case[name] for name in ("site", "weights", "bucket", "park", "prefetch", "accumulation")}
    return plan_of(made(case), in_backward=case["clip"] == "in-backward", max_norm=NORMS[case["clip"]], **where)


def batches_of(case: Mapping[str, Any], device: str) -> list[dict[str, Tensor]]:
    count = STEPS * case["accumulation"]
    found = tokens("experts", count) if case["model"] == "experts" else odd_batches(count)
    return [{name: value.to(device) for name, value in batch.items()} for batch in found]


def key_of(row: Row) -> tuple[object, ...]:
    """What plain training has to know."""
    return tuple(row[name] for name in ("model", "clip", "accumulation", "recompute", "dtype"))


def plainly(case: Mapping[str, Any]) -> Result:
    quickly()
    loop = {"accumulation": case["accumulation"], "max_norm": NORMS[case["clip"]]}
    return plain(made(case).to(DEVICE), batches_of(case, DEVICE), **loop)


def stowed(case: Mapping[str, Any], plan: Any, moves: Transfer, device: str = DEVICE) -> Result:
    """By the engine."""
    model, count = made(case), case["accumulation"]
    optimizer: Any = stow(
        model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device=device, transfer=moves, beside=True
    )
    losses, norms = [], []
    batches = batches_of(case, device)
    torch.manual_seed(5)
    for start in range(0, len(batches), count):
        for batch in batches[start : start + count]:
            loss = model(**batch).loss / count
            loss.backward()
            losses.append(loss.item() if case["looks"] else loss.detach())
        if NORMS[case["clip"]]:
            norms.append(optimizer.clip_grad_norm_(NORMS[case["clip"]]))
        optimizer.step()
        optimizer.zero_grad()
    result = Result([float(loss) for loss in losses], [float(norm) for norm in norms])
    weights = model.state_dict()
    for name, param in model.named_parameters():
        result.tensors[name] = weights[name].cpu().clone()
        if param.requires_grad:
            state = optimizer.state_of(param).items()
            result.tensors |= {f"{name} {key}": value.cpu().clone() for key, value in state}
    optimizer.close()
    return result


Known = Mapping[tuple[object, ...], Any]  # what plain training leaves


def on_grid(row: Row, plan: Any, known: Known) -> list[str]:
    slowly(str(row["slow"]))
    return differences(known[key_of(row)], stowed(row, plan, Slow()))


def watched(row: Row, plan: Any) -> list[str]:
    """On the CPU, under the race detector."""
    slowly("all")
    watch = RaceDetector()
    stowed(row, plan, watch, "cpu")
    return watch.races


# --- saved tensors on the host ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two products; draws nothing, for a kernel that draws is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x))).transpose(0, 1).tanh().transpose(0, 1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def hosting(moves: Transfer, device: str, num_bytes: int) -> Stack:
    """All of its layers send their inputs and both products."""
    model = Stack().to(device)
    names = {f"layers.{index}": ("linear 0", "linear 1") for index in range(len(model.layers))}
    room = HostRoom(list(model.layers), arena_of_saved(num_bytes, torch.device(device)), moves)
    checkpoint_blocks(model, names, {name: (INPUT, *kept) for name, kept in names.items()}, room)
    model(torch.randn(2, 6).to(device)).sum().backward()  # looks only
    model.zero_grad()
    return model


def saved(loop: str, lane: str, device: str = DEVICE) -> list[str]:
    """What people do with graphs."""
    from tests.parity import test_activations as tests

    slowly(lane, 4)
    tests.rows = lambda number: torch.randn(number, 6).to(device).requires_grad_()
    moves = Slow() if device == DEVICE else RaceDetector()
    grads = []
    for model in (Stack().to(device), hosting(moves, device, 1 << 16)):
        torch.manual_seed(4)
        for _ in range(3):
            getattr(tests, loop)(model)
        grads.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
    unequal = sum(not torch.equal(one, two) for one, two in zip(*grads, strict=True))
    return [*getattr(moves, "races", []), *([f"{unequal} gradients"] if unequal else [])]


LOOPS = ("retained", "two_forwards", "half", "abandoned", "evaluated", "partly", "of_any_length")


def title(row: Row) -> str:
    """A row as a few words."""
    bare = ("model", "site", "dtype")
    return "-".join(str(level) if name in bare else f"{name}:{level}" for name, level in row.items())
