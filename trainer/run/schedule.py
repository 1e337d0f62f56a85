"""The state of a learning rate schedule, as JSON: ``scheduler.json``.

A schedule that is a function of the step has one number of state, how many steps were taken: rates are computed anew
from the config. One that follows the evaluation loss has history, which is saved and taken over whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "scheduler.json"
VERSION = 1


def save(path: Path, scheduler: Any) -> None:
    """Write how far the schedule is; ValueError if it has state that JSON cannot hold."""
    if is_function_of_step(scheduler):
        state = {"last_epoch": scheduler.last_epoch, "_step_count": scheduler._step_count}
    else:
        state = scheduler.state_dict()
    try:
        text = json.dumps({"version": VERSION, "kind": type(scheduler).__name__, "state": state})
    except (TypeError, ValueError):
        raise ValueError(f"the schedule {type(scheduler).__name__} has state that JSON cannot hold") from None
    path.write_text(text)


def load(path: Path, scheduler: Any, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Go on with the schedule, and set the rates of its optimizer.

    Args:
        groups: the saved groups, whose rates are taken over if the schedule has history.

    Raises:
        ValueError: the file cannot be read, or is of another kind of schedule.
    """
    try:
        content = json.loads(path.read_bytes())
        version, kind, state = content["version"], content["kind"], dict(content["state"])
        count = int(state["last_epoch"]) if is_function_of_step(scheduler) else 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: damaged, not the state of a schedule") from None
    if version != VERSION:
        raise ValueError(f"{path}: format {version}, this release reads {VERSION}")
    current = scheduler.optimizer.param_groups
    if is_function_of_step(scheduler):
        scheduler.last_epoch = count
        scheduler._step_count = int(state.get("_step_count", count + 1))
        rates = [base * rule(count) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    elif kind != type(scheduler).__name__:
        raise ValueError(f"{path}: of the schedule {kind}, and this run has {type(scheduler).__name__}")
    else:
        scheduler.load_state_dict(state)
        rates = [group["lr"] for group in (current if groups is None else groups)]
    if len(rates) != len(current):
        raise ValueError(f"{path}: of {len(rates)} groups of parameters, and this run has {len(current)}")
    for group, rate in zip(current, rates, strict=False):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def is_function_of_step(scheduler: Any) -> bool:
    """Whether every rate is the first one times a function of the step."""
    return hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs")
