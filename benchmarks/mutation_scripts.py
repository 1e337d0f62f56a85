"""What people do with a stowed model besides training it: scripts for the cases of ``mutations.py``. (Loading weights
and ``present`` reach no place of their own; ``tests/accelerator`` runs them on the simulated device.)

A script takes a model and its optimizer, stowed or plain (``tests.helpers.sides.Plain``), and returns what it saw.
Unlike those of the tests it has its batches on the device and reads no loss, so that the host runs ahead.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.slow_lanes import Slow, library
from strategies.engine.transfer.transfer import Lane
from tests.helpers import sides
from tests.helpers.models import build, odd_batches
from tests.helpers.sides import copies

Seen = list[Any]


def batches(count: int) -> list[dict[str, Tensor]]:
    """Batches that are on the device already: the host waits for all of compute when it copies pageable memory up,
    which would hide races."""
    return [{name: value.to(sides.ground.device) for name, value in batch.items()} for batch in odd_batches(count)]


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def step(model: nn.Module, optimizer: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    finish(optimizer)
    return loss.detach()


def reads(model: nn.Module, optimizer: Any) -> Seen:
    """Read weights outside of modules, with gradients and without."""
    found: Seen = []
    for batch in batches(4):
        loss = model(**batch).loss + 1e-2 * sum((param**2).sum() for param in model.parameters())
        loss.backward()
        finish(optimizer)
        with torch.no_grad():
            found += [loss.detach(), *(param.abs().sum() for param in model.parameters())]
    return found


def state_dicts(model: nn.Module, optimizer: Any) -> Seen:
    found: Seen = []
    layers: Any = model.layers
    for batch in batches(4):
        loss = model(**batch).loss
        found.append(copies(model))
        loss.backward()
        found.append(copies(layers[1]))
        finish(optimizer)
        found += [copies(layers[2]), copies(model)]
    return found


def saves(model: nn.Module, optimizer: Any) -> Seen:
    """Save the state after each step, load it again, and read the optimizer's state dict."""
    found: Seen = []
    for batch in batches(4):
        found.append(step(model, optimizer, batch))
        if not isinstance(optimizer, sides.Plain):
            with tempfile.TemporaryDirectory() as folder:
                optimizer.save(folder)
                optimizer.load(folder)
        states = optimizer.state_dict()["state"].values()
        found.append([value.detach().to("cpu", copy=True) for state in states for value in state.values()])
    return found


def infinite(model: nn.Module, optimizer: Any, drains: bool = False) -> Seen:
    """Some gradients are infinite and those steps are skipped; with ``drains``, ask each time how many were."""
    found: Seen = []
    bad, is_plain = (1, 2, 4), isinstance(optimizer, sides.Plain)
    for number, batch in enumerate(batches(8)):
        loss = model(**batch).loss
        (loss * (float("inf") if number in bad else 1.0)).backward()
        if not (number in bad and is_plain):
            optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if drains:
            optimizer.drain()
            found.append(sum(each <= number for each in bad) if is_plain else optimizer.skipped)
    return found


def trains(model: nn.Module, optimizer: Any, counts: Sequence[int] = (3, 3, 3, 3)) -> Seen:
    """Train without reading anything before the end, by micro-batches per step; where negative, their gradients are
    discarded."""
    found: Seen = []
    left = iter(batches(sum(map(abs, counts))))
    for count in counts:
        for batch in itertools.islice(left, abs(count)):
            found.append(model(**batch).loss)
            found[-1].backward()
        if count > 0:
            optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(model: nn.Module, optimizer: Any) -> Seen:
    """Read gradients between micro-batches, remove one, and clip with torch's own function."""
    found: Seen = []
    params = list(model.parameters())
    left = iter(batches(12))
    for _ in range(4):
        for batch in itertools.islice(left, 3):
            model(**batch).loss.backward()
            found += [param.grad.clone() for param in params[2:9] if param.grad is not None]
        params[5].grad = None
        found.append(torch.nn.utils.clip_grad_norm_(params, 0.05))
        finish(optimizer)
    return found


def evaluates(model: nn.Module, optimizer: Any) -> Seen:
    """Evaluate before and after each step. Clipping comes first, so that what an update waits for is older than the
    last use of the weights."""
    found: Seen = []
    for batch in batches(5):
        found.append(model(**batch).loss)
        found[-1].backward()
        found.append(optimizer.clip_grad_norm_(0.5))
        for update in (False, True):
            if update:
                finish(optimizer)
            with torch.no_grad():
                found.append(model(**batch).loss)
    return found


def on_and_off(model: nn.Module, optimizer: Any) -> Seen:
    """Blocks that only some steps use."""
    found: Seen = []
    spec: Any = model.spec
    for number, batch in enumerate(batches(8)):
        model.spec = replace(spec, calls=tuple(i for i in range(6) if (i + number) % 3))
        found.append(step(model, optimizer, batch))
    model.spec = spec
    return found


def states(model: nn.Module, optimizer: Any) -> Seen:
    """Read the optimizer's state right after a step, and views of weights."""
    found: Seen = []
    for batch in batches(4):
        step(model, optimizer, batch)
        for param in model.parameters():
            found += [value.to("cpu", copy=True) for key, value in optimizer.state_of(param).items() if key != "step"]
        step(model, optimizer, batch)
        found += [param.data.clone().to("cpu") for param in model.parameters()]
    return found


def writes_late(model: nn.Module, optimizer: Any) -> Seen:
    """Write to present weights while compute is slow: the write is copied home when other weights come in."""
    found: Seen = []
    layers: Any = model.layers
    for number, batch in enumerate(batches(4)):
        step(model, optimizer, batch)
        params = list(layers[-1 - number % 2].parameters())
        with torch.no_grad():
            found.append(model(**batch).loss)
            with optimizer.present(params):
                torch.accelerator.synchronize()
                library().slow(0, 20_000 if Lane.COMPUTE in Slow.lanes else 0)
                for param in params:
                    param.mul_(1.5)
            library().slow(0, 0)
            found.append(model(**batch).loss)
    return found


def closes(layouts: Sequence[sides.Layout]) -> None:
    """Close while the first weights are on their way."""
    for layout in layouts:
        plain, model = sides.ground.put(made("blocks")), made("blocks")
        for side, optimizer in ((plain, sides.Plain(plain, 0.0)), (model, sides.stowed(model, layout))):
            for batch in batches(2):
                step(side, optimizer, batch)
            optimizer.close()
        assert sides.unequal(copies(plain), copies(model)) == [], layout


# --- all of them -----------------------------------------------------------------------------------------------------

LAYOUTS: Sequence[sides.Layout] = (
    *sides.LAYOUTS,
    {"site": "host", "park": "host"},
    {"site": "host"},
    {"site": "streamed", "park": "host"},
    {"site": "streamed"},
    {"site": "device", "weights": "travelling", "prefetch": 5},
)


def made(kind: str) -> nn.Module:
    """A model; of "two" only the blocks train, so that each bucket has a slot of its own."""
    model: Any = build("few" if kind == "two" else kind)
    model.embed.requires_grad_(kind != "two")
    trained: nn.Module = model
    return trained


def both(script: sides.Script, layouts: Sequence[sides.Layout], kind: str = "blocks", **options: Any) -> None:
    """Run the script on both sides; ``options`` are those of ``both_sides`` and ``plan_of``."""
    sides.both_sides(partial(made, kind), script, layouts, **options)


_trains = partial(both, trains, accumulation=3, max_norm=0.5)
SCRIPTS: Mapping[str, Callable[[Sequence[sides.Layout]], None]] = {
    "reads": partial(both, reads),
    "state dicts": partial(both, state_dicts),
    "save": partial(both, saves),
    "infinite": partial(both, infinite, max_norm=0.5),
    "infinite, unclipped": partial(both, infinite),
    "infinite, unfused": partial(both, infinite, max_norm=0.5, fused=False),  # its kernel has no flag to skip a step
    "fewer": partial(both, partial(trains, counts=(3, 1, 2, -2, 3, -1, 2)), accumulation=3, max_norm=0.5),
    "gradients": partial(both, gradients, accumulation=3),
    "evaluates": partial(both, evaluates, max_norm=0.5),
    "on and off": partial(both, on_and_off, max_norm=0.5),
    "states": partial(both, states),
    "writes late": partial(both, writes_late),
    "skips": partial(both, partial(infinite, drains=True), kind="few"),
    "closes": closes,
    "trains at once, two": partial(both, partial(trains, counts=[1] * 8), kind="two", bucket="several"),
    "trains": _trains,
    "trains, few": partial(_trains, kind="few", bucket="several"),
    "trains, few, half": partial(_trains, kind="few", bucket="half"),
}
