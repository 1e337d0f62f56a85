"""Run other people's Python once more than they expect, and leave no trace.

To plan, a model's forward runs on fake tensors, and a Trainer makes its first call of the model before training does.
Either may count its calls, draw random numbers, cache what it has computed or initialise itself the first time.
Afterwards attributes are the objects that they were, containers have what they had, and random generators are where
they were: those of torch, numpy and Python, and those that the objects hold. That goes for what the objects hold at
any depth, through attributes, containers and closures. Objects of libraries, but for modules, are not looked into:
threads of their own may be at work there.

Not undone: what happens outside of the objects that are given (files, global variables), iterators, attributes in
``__slots__``, items of containers with more than ``LARGE``, and in-place writes to tensors and arrays of more than
``COPIED_BYTES`` (a forward on fake tensors cannot write to tensors). Datasets, which hold anything, are called in
another process (``forked.py``).
"""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from strategies.engine.effects import source

LARGE, COPIED_BYTES, MOST_OBJECTS = 1_000, 1 << 16, 1_000_000
ATOMS = (*weakref.ProxyTypes, str, bytes, int, float, complex, type, types.ModuleType, torch.dtype, torch.device)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextmanager
def undisturbed(*objects: Any) -> Iterator[None]:
    """What happens inside to ``objects`` (modules: to all within) and to random numbers is undone."""
    everyone = [inner for one in objects for inner in (one.modules() if isinstance(one, nn.Module) else (one,))]
    with ExitStack() as undo, torch.random.fork_rng():
        undo.callback(random.setstate, random.getstate())
        undo.callback(numpy.random.set_state, numpy.random.get_state())
        _remember([vars(one) for one in everyone if hasattr(one, "__dict__")], undo)
        yield


def _remember(given: Iterable[Any], undo: ExitStack) -> None:
    """The nearest first."""
    waiting, seen = deque(given), dict[int, Any]()
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        if value is None or isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value  # which keeps it alive, so that no address comes twice
        back = _back(value)
        if back is not None:
            undo.callback(back)
        waiting.extend(_within(value))


def _within(value: Any) -> Iterator[Any]:
    """What ``value`` holds."""
    if isinstance(value, CONTAINERS) and len(value) <= LARGE:
        yield from value.values() if isinstance(value, dict) else value
    if isinstance(value, types.CellType):
        yield from _content(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType) and not _of_a_library(value.__module__):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
    if isinstance(value, nn.Module) or (hasattr(value, "__dict__") and not _of_a_library(type(value).__module__)):
        yield vars(value)


@functools.cache
def _of_a_library(module: str) -> bool:
    """Whether what is defined in ``module`` was installed, or belongs to Python."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module in sys.builtin_module_names or file.startswith(LIBRARIES)


def _back(value: Any) -> Callable[[], Any] | None:
    """What gives ``value`` its present content back, where it is of a kind that changes in place."""
    if isinstance(value, dict | list | set | deque):
        return partial(_fill, value, dict(value) if isinstance(value, dict) else list(value))
    if isinstance(value, types.CellType):
        return partial(_fill_cell, value, _content(value))
    if (generator := source(value)) is not None:
        get, put = generator
        return partial(put, get())
    if type(value) is numpy.ndarray and value.nbytes <= COPIED_BYTES and value.flags.writeable:
        return partial(numpy.copyto, value, value.copy())
    if type(value) is Tensor and value.is_cpu and not value.requires_grad and not value.is_inference():
        return _tensor_back(value)
    return None


def _tensor_back(value: Tensor) -> Callable[[], Any] | None:
    """Only if it was written to: torch counts the writes, and a graph may want it as it is."""
    if value.layout is not torch.strided or value.nbytes > COPIED_BYTES:
        return None
    content, version = value.clone(), value._version

    def back() -> None:
        if value._version != version:
            value.detach().copy_(content)

    return back


def _content(cell: types.CellType) -> tuple[Any, ...]:
    """Of a variable that a closure has: nothing, before it is assigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    if content:
        cell.cell_contents = content[0]
    elif _content(cell):
        del cell.cell_contents


def _fill(value: Any, content: Any) -> None:
    """Containers that have not changed are left alone: some would refuse."""
    if isinstance(value, dict):
        same = [*map(id, value), *map(id, value.values())] == [*map(id, content), *map(id, content.values())]
    else:
        same = [*map(id, value)] == [*map(id, content)]
    if not same:
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(content)
