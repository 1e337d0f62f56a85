"""Run other people's Python once more than they expect, and leave no trace.

To plan, a model's forward runs on fake tensors, and a Trainer makes its first batch before training does. Either may
count its calls, draw random numbers, cache what it has computed or initialise itself the first time. Afterwards
attributes are the objects that they were, lists, dicts and sets have what they had, and random generators are where
they were: those of torch, numpy and Python, and those that the objects hold.

Not undone: what happens outside of the objects that are given (files, other objects' insides), and in-place writes to
real tensors and arrays, which a forward on fake tensors cannot make.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn


@contextmanager
def undisturbed(*objects: Any) -> Iterator[None]:
    """What happens inside to attributes of ``objects`` (modules: of all within) and to random numbers is undone."""
    everyone = [inner for one in objects for inner in (one.modules() if isinstance(one, nn.Module) else (one,))]
    with ExitStack() as undo, torch.random.fork_rng():
        undo.callback(random.setstate, random.getstate())
        undo.callback(numpy.random.set_state, numpy.random.get_state())
        seen: set[int] = set()
        for one in everyone:
            if hasattr(one, "__dict__"):
                _remember(vars(one), undo, seen)
        yield


def _remember(attributes: dict[str, Any], undo: ExitStack, seen: set[int]) -> None:
    """Also of dicts within: trainers keep metrics in dicts of dicts of lists."""
    if id(attributes) in seen:
        return
    seen.add(id(attributes))
    undo.callback(_fill, attributes, attributes.copy())
    for value in attributes.values():
        if isinstance(value, dict):
            _remember(value, undo, seen)
        else:
            back = _back(value)
            if back is not None:
                undo.callback(back)


def _back(value: Any) -> Callable[[], Any] | None:
    """What gives ``value`` its present content back, where it is of a kind that changes in place."""
    if isinstance(value, list | set):
        return partial(_fill, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _fill(value: Any, content: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)
