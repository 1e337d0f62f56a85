"""The small parts of a checkpoint, as JSON: how far the schedule is, and the states of one rank's random generators.

A schedule that is a function of the step has one number of state, how many steps were taken: rates are computed anew
from the config. One that follows the evaluation loss has history, which is saved and taken over whole.

Of generators (Python's, NumPy's, torch's on the CPU and on the device) numbers are written as they are, and torch's
states, which are bytes, in hexadecimal. Nothing is pickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strategies.engine.memory import accelerator

SCHEDULE = "scheduler.json"
VERSION = 1
UNREADABLE = (OSError, ValueError, LookupError, TypeError, RuntimeError, OverflowError)


@contextmanager
def _content_of(path: Path, what: str) -> Iterator[dict[str, Any]]:
    """What was written into ``path``. ValueError, in one line, if it cannot be read, or not be taken over inside."""
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"{path}: format {content['version']}, this release reads {VERSION}")
        yield content
    except UNREADABLE as error:
        said = str(error).startswith(f"{path}: ")
        raise ValueError(str(error) if said else f"{path}: damaged, not the state of {what}") from None


def save_schedule(path: Path, scheduler: Any) -> None:
    """Write how far the schedule is; ValueError if it has state that JSON cannot hold."""
    if _is_function_of_step(scheduler):
        state = {"last_epoch": scheduler.last_epoch, "_step_count": scheduler._step_count}
    else:
        state = scheduler.state_dict()
    try:
        text = json.dumps({"version": VERSION, "kind": type(scheduler).__name__, "state": state})
    except (TypeError, ValueError):
        raise ValueError(f"the schedule {type(scheduler).__name__} has state that JSON cannot hold") from None
    path.write_text(text)


def load_schedule(path: Path, scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Go on with the schedule, and set the rates of its optimizer; those of the saved ``groups`` if it has history.
    Raise ValueError if the file cannot be read, or is of another kind of schedule.
    """
    with _content_of(path, "a schedule") as content:
        kind, state = content["kind"], dict(content["state"])
        if _is_function_of_step(scheduler):
            count = int(state["last_epoch"])
            scheduler.last_epoch, scheduler._step_count = count, int(state.get("_step_count", count + 1))
            rates = [base * rule(count) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        elif kind != type(scheduler).__name__:
            raise ValueError(f"{path}: of the schedule {kind}, and this run has {type(scheduler).__name__}")
        else:
            scheduler.load_state_dict(state)
            rates = [group["lr"] for group in groups]
        current = scheduler.optimizer.param_groups
        if len(rates) != len(current):
            raise ValueError(f"{path}: of {len(rates)} groups of parameters, and this run has {len(current)}")
    for group, rate in zip(current, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _is_function_of_step(scheduler: Any) -> bool:
    """Whether every rate is the first one times a function of the step."""
    return hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs")


def generators_file(folder: Path, rank: int, ranks: int) -> Path:
    """Where the states of a rank's generators are written."""
    return folder / f"random_state-{rank:05}-of-{ranks:05}.json"


def saved_generators(folder: Path, rank: int) -> Path | None:
    """The states of ``rank`` in a checkpoint, of however many ranks."""
    return min(folder.glob(f"random_state-{rank:05}-of-*.json"), default=None)


def save_generators(path: Path) -> None:
    """Write the present states."""
    kind = accelerator.kind()
    name, keys, *rest = np.random.get_state(legacy=True)
    content = {
        "version": VERSION,
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.random.get_rng_state()),
        "device": None if kind is None else [kind, _hex(torch.get_device_module(kind).get_rng_state())],
    }
    path.write_text(json.dumps(content))


def load_generators(path: Path) -> None:
    """Take over the states in ``path``; the device's only on a device of that kind. ValueError has changed nothing."""
    before = random.getstate(), np.random.get_state(legacy=True), torch.random.get_rng_state()
    with _content_of(path, "generators") as content:
        version, numbers, gauss = content["python"]
        name, keys, *rest = content["numpy"]
        on_cpu, on_device = _tensor(content["torch"]), content["device"]
        try:
            random.setstate((version, tuple(numbers), gauss))
            np.random.set_state((name, np.array(keys, np.uint32), *rest))
            torch.random.set_rng_state(on_cpu)
            if on_device is not None and on_device[0] == accelerator.kind():
                torch.get_device_module(on_device[0]).set_rng_state(_tensor(on_device[1]))
        except BaseException:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.random.set_rng_state(before[2])
            raise


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
