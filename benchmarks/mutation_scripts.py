"""What people do with a stowed model besides training it, as cases for ``mutations.py``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mutation_cases import (
    DEVICE,
    Known,
    Slow,
    library,
    made,
    quickly,
    slowly,
)  # fmt: skip
from strategies.engine import AdamW, stow
from strategies.engine.transfer.race_detector import RaceDetector
from strategies.engine.transfer.transfer import Lane, Transfer
from tests.helpers import sides
from tests.helpers.engine import DECAY, LR, plan_of
from tests.helpers.models import Spec, odd_batches

TIMES = 5  # slower than the cases of the grid: these have fewer steps

# --- what else people do ---------------------------------------------------------------------------------------------

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    **sides.LAYOUTS,
    "host, resident": {"site": "host", "park": "host"},
    "host, parks on the device": {"site": "host"},
    "streamed, resident": {"site": "streamed", "park": "host"},
    "streamed, parks on the device": {"site": "streamed"},
    "device, travelling": {"site": "device", "weights": "travelling", "prefetch": 5},
}
Losses = list[Any]


def batches(count: int) -> list[dict[str, Tensor]]:
    """There already: a copy up from memory that is not pinned is waited for, and with it all that came before."""
    return [{name: value.to(sides.ground.device) for name, value in batch.items()} for batch in odd_batches(count)]


def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def reads(model: nn.Module, optimizer: Any) -> Losses:
    """Outside of modules, with gradients and without."""
    found: Losses = []
    for batch in batches(4):
        loss = forward(model, batch) + 1e-2 * sum((param**2).sum() for param in model.parameters())
        loss.backward()
        finish(optimizer)
        with torch.no_grad():
            found += [loss.detach(), *(param.abs().sum() for param in model.parameters())]
    return found


def presents(model: nn.Module, optimizer: Any) -> Losses:
    params, found = list(model.parameters()), []
    for batch in batches(4):
        forward(model, batch).backward()
        with optimizer.present(params[2:4]), torch.no_grad():
            params[3].add_(0.25)
        finish(optimizer)
        with optimizer.present(params):
            found += [param.detach().clone() for param in params]
        with optimizer.present(params[3:7]), torch.no_grad():
            params[4].mul_(1.5)
            found.append(forward(model, batch))
    return found


def state_dicts(model: nn.Module, optimizer: Any) -> Losses:
    found: Losses = []
    layers: Any = model.layers
    for batch in batches(4):
        loss = forward(model, batch)
        found.append(_copies(model))
        loss.backward()
        found.append(_copies(layers[1]))
        finish(optimizer)
        found += [_copies(layers[2]), _copies(model)]
    return found


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}


def loads(model: nn.Module, optimizer: Any) -> Losses:
    other = {name: value * 0.5 for name, value in _copies(model).items()}
    layers: Any = model.layers
    part = {name.removeprefix("layers.3."): value for name, value in other.items() if name.startswith("layers.3.")}
    found = []
    for number, batch in enumerate(batches(6)):
        found.append(forward(model, batch))
        found[-1].backward()
        finish(optimizer)
        if number == 1:
            model.load_state_dict(other)
        if number == 3:
            layers[3].load_state_dict(part)
    return found


def saves(model: nn.Module, optimizer: Any) -> Losses:
    """And loads what it saved, and what its state dict said a step ago."""
    found: Losses = []
    for batch in batches(4):
        found.append(forward(model, batch))
        found[-1].backward()
        finish(optimizer)
        if not isinstance(optimizer, sides.Plain):
            with tempfile.TemporaryDirectory() as folder:
                optimizer.save(folder)
                optimizer.load(folder)
        states = optimizer.state_dict()["state"].values()
        found.append([value.detach().to("cpu", copy=True) for state in states for value in state.values()])
    return found


def infinite(model: nn.Module, optimizer: Any) -> Losses:
    """Steps that are skipped."""
    found: Losses = []
    for number, batch in enumerate(batches(8)):
        loss = forward(model, batch)
        bad = number in (1, 2, 4)
        (loss * float("inf") if bad else loss).backward()
        if not (bad and isinstance(optimizer, sides.Plain)):
            optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def fewer(model: nn.Module, optimizer: Any) -> Losses:
    """Fewer micro-batches than planned, and some that are given up."""
    found: Losses = []
    left = iter(batches(14))
    for count in (3, 1, 2, -2, 3, -1, 2):
        for batch in (next(left) for _ in range(abs(count))):
            found.append(forward(model, batch))
            found[-1].backward()
        if count > 0:
            optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(model: nn.Module, optimizer: Any) -> Losses:
    """Read between micro-batches, clipped by torch's own function, some of them taken away."""
    found: Losses = []
    params = list(model.parameters())
    left = iter(batches(12))
    for _ in range(4):
        for batch in (next(left) for _ in range(3)):
            forward(model, batch).backward()
            found += [param.grad.clone() for param in params[2:9] if param.grad is not None]
        params[5].grad = None
        found.append(torch.nn.utils.clip_grad_norm_(params, 0.05))
        finish(optimizer)
    return found


def evaluates(model: nn.Module, optimizer: Any, norm: float = 0.0) -> Losses:
    """Before and after each step; with a norm, clipping comes before: what an update waits for is then older than the
    last use of the weights."""
    found: Losses = []
    for batch in batches(5):
        loss = forward(model, batch)
        loss.backward()
        found += [loss, optimizer.clip_grad_norm_(norm)] if norm else [loss]
        with torch.no_grad():
            found.append(forward(model, batch))
        finish(optimizer)
        with torch.no_grad():
            found.append(forward(model, batch))
    return found


def on_and_off(model: nn.Module, optimizer: Any) -> Losses:
    """Blocks that only some steps use."""
    found: Losses = []
    spec: Spec = model.spec  # type: ignore[assignment]
    for number, batch in enumerate(batches(8)):
        model.spec = replace(spec, calls=tuple(i for i in range(6) if (i + number) % 3))  # type: ignore[assignment]
        found.append(forward(model, batch))
        found[-1].backward()
        finish(optimizer)
    model.spec = spec  # type: ignore[assignment]
    return found


def trains(model: nn.Module, optimizer: Any) -> Losses:
    """And looks at nothing before the end; three micro-batches at a time."""
    found: Losses = []
    for number, batch in enumerate(batches(12)):
        found.append(forward(model, batch))
        found[-1].backward()
        if number % 3 == 2:
            finish(optimizer)
    return found


def trains_at_once(model: nn.Module, optimizer: Any) -> Losses:
    found: Losses = []
    for batch in batches(8):
        found.append(forward(model, batch))
        found[-1].backward()
        finish(optimizer)
    return found


def states(model: nn.Module, optimizer: Any) -> Losses:
    """Optimizer state right after each step, and views of weights."""
    found: Losses = []
    for batch in batches(4):
        forward(model, batch).backward()
        finish(optimizer)
        for param in model.parameters():
            found += [value.to("cpu", copy=True) for key, value in optimizer.state_of(param).items() if key != "step"]
        forward(model, batch).backward()
        finish(optimizer)
        found += [param.data.clone().to("cpu") for param in model.parameters()]
    return found


def writes_late(model: nn.Module, optimizer: Any) -> Losses:
    """What is written on loan is on its way to its home when others move in."""
    found: Losses = []
    layers: Any = model.layers
    for number, batch in enumerate(batches(4)):
        forward(model, batch).backward()
        finish(optimizer)
        with torch.no_grad():
            found.append(forward(model, batch))
            with optimizer.present(list(layers[-1 - number % 2].parameters())):
                torch.accelerator.synchronize()
                library().slow(0, 20_000 if Lane.COMPUTE in Slow.lanes else 0)
                for param in layers[-1 - number % 2].parameters():
                    param.mul_(1.5)
            library().slow(0, 0)
            found.append(forward(model, batch))
    return found


def skips(model: nn.Module, optimizer: Any) -> Losses:
    """What is known after ``drain``."""
    found: Losses = []
    for number, batch in enumerate(batches(5)):
        bad = number in (1, 2, 4)
        (forward(model, batch) * (float("inf") if bad else 1.0)).backward()
        if not (bad and isinstance(optimizer, sides.Plain)):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.drain()
        found.append((0, 1, 2, 2, 3)[number] if isinstance(optimizer, sides.Plain) else optimizer.skipped)
    return found


def closes(model: nn.Module, optimizer: Any) -> Losses:
    """While the first weights are on their way."""
    for batch in batches(2):
        forward(model, batch).backward()
        finish(optimizer)
    optimizer.close()
    return [param.detach().to("cpu", copy=True) for param in model.parameters()]


@dataclass(frozen=True, slots=True)
class Script:
    """Something that both sides do. ``wishes``: of the plan; ``unfused``: by the kernels without a flag to skip."""

    run: sides.Script
    model: str = "blocks"
    max_norm: float = 0.0
    accumulation: int = 1
    unfused: bool = False
    times: int = TIMES
    wishes: Mapping[str, Any] = field(default_factory=dict)


SCRIPTS: Mapping[str, Script] = {
    "reads": Script(reads),
    "present": Script(presents),
    "state dicts": Script(state_dicts),
    "load": Script(loads),
    "save": Script(saves),
    "infinite": Script(infinite, max_norm=0.5),
    "infinite, unclipped": Script(infinite),
    "infinite, unfused": Script(infinite, max_norm=0.5, unfused=True),
    "fewer": Script(fewer, accumulation=3, max_norm=0.5),
    "gradients": Script(gradients, accumulation=3),
    "evaluates": Script(evaluates),
    "evaluates, clipped": Script(partial(evaluates, norm=0.5), max_norm=0.5),
    "on and off": Script(on_and_off, max_norm=0.5),
    "states": Script(states),
    "writes late": Script(writes_late),
    "skips": Script(skips, model="few"),
    "closes": Script(closes),
    "trains at once, two": Script(trains_at_once, "two", times=4 * TIMES, wishes={"bucket": "several"}),
    "trains": Script(trains, accumulation=3, max_norm=0.5),
    "trains, few": Script(trains, "few", accumulation=3, max_norm=0.5, wishes={"bucket": "several"}),
    "trains, few, half": Script(trains, "few", accumulation=3, max_norm=0.5, wishes={"bucket": "half"}),
}


def plain_script(script: Script) -> list[Any]:
    """What it sees and leaves in plain training."""
    quickly()
    sides.ground.device = torch.device(DEVICE)
    model = sides.ground.put(made(_model(script)))
    optimizer = sides.Plain(model, script.max_norm)
    for group in optimizer.param_groups:
        group["fused"] = not script.unfused
    return [script.run(model, optimizer), *([] if script.run is closes else [sides.everything(model, optimizer)])]


def _model(script: Script) -> dict[str, Any]:
    return {"model": script.model, "recompute": False, "dtype": "float32"}


def _stowed_script(script: Script, layout: str, moves: Transfer, device: str) -> list[Any]:
    sides.ground.device = torch.device(device)
    model = made(_model(script))
    wishes = {"max_norm": script.max_norm, "accumulation": script.accumulation, **LAYOUTS[layout], **script.wishes}
    rule = AdamW(lr=LR, weight_decay=DECAY, fused=not script.unfused)
    plan: Any = plan_of(model, **wishes)
    optimizer: Any = stow(sides.ground.feed(model), plan, rule=rule, device=device, transfer=moves, beside=True)
    found = [script.run(model, optimizer), *([] if script.run is closes else [sides.everything(model, optimizer)])]
    optimizer.close()
    return found


def one_script(name: str, layout: str, lane: str, known: Known) -> list[str]:
    slowly(lane, SCRIPTS[name].times)
    found = _stowed_script(SCRIPTS[name], layout, Slow(), DEVICE)
    torch.accelerator.synchronize()
    where = sides._first_difference(known["script", name], found)
    return [] if where is None else [where]


def watched_script(name: str, layout: str, known: Known) -> list[str]:
    watch = RaceDetector()
    slowly("all")
    _stowed_script(SCRIPTS[name], layout, watch, "cpu")
    return watch.races
