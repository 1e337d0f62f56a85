"""Run other people's Python once more than they expect and undo its side effects.

To plan, a model's forward runs on fake tensors, and a Trainer makes its first call of the model before training does.
Afterwards attributes are the same objects as before, containers have the same items, and random generators have the
same state: those of torch, numpy and Python, and those that the objects hold, at any depth, through attributes,
containers and closures. Objects of libraries, except modules, are not looked into: they may have threads of their own.

Not undone: effects outside of the given objects (files, global variables), iterators, attributes in ``__slots__``,
items of containers with more than ``LARGE`` items, and in-place writes to tensors and arrays of more than
``COPIED_BYTES`` (a forward on fake tensors cannot write to tensors).

A dataset may count its calls and draw random numbers in places that nobody could list and undo: a queue, the state of a
compiled library. It is called in a forked copy of this process, as a ``DataLoader`` with workers does. A fork shares
file offsets; those of files open for reading are restored. Not undone: writes to files, to shared memory and over
connections. Accelerators cannot be used there.
"""

from __future__ import annotations

import fcntl
import functools
import io
import multiprocessing
import os
import pickle
import random
import stat
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from deepstow.strategies.engine.forward.effects import source
from deepstow.trainer.errors import first_line

T = TypeVar("T")
LARGE, COPIED_BYTES, MOST_OBJECTS = 1_000, 1 << 16, 1_000_000
ATOMS = (*weakref.ProxyTypes, str, bytes, int, float, complex, type, types.ModuleType, torch.dtype, torch.device)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextmanager
def undisturbed(*objects: Any) -> Iterator[None]:
    """Undo what happens inside to ``objects`` (submodules included) and to the state of random generators."""
    everyone = [inner for each in objects for inner in (each.modules() if isinstance(each, nn.Module) else (each,))]
    with ExitStack() as undo, torch.random.fork_rng():
        undo.callback(random.setstate, random.getstate())
        undo.callback(numpy.random.set_state, numpy.random.get_state())
        _record([vars(each) for each in everyone if hasattr(each, "__dict__")], undo)
        yield


def _record(given: Iterable[Any], undo: ExitStack) -> None:
    """Record the content of what ``given`` holds, breadth first, for ``undo`` to restore."""
    waiting, seen = deque(given), dict[int, Any]()
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        if value is None or isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value  # keeps it alive, so that no id is used again
        restore = _restorer(value)
        if restore is not None:
            undo.callback(restore)
        waiting.extend(_within(value))


def _within(value: Any) -> Iterator[Any]:
    """The objects that ``value`` holds."""
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
    """Whether ``module`` is an installed package or belongs to Python."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module in sys.builtin_module_names or file.startswith(LIBRARIES)


def _restorer(value: Any) -> Callable[[], Any] | None:
    """A function that restores the present content of ``value``; None if it cannot change in place."""
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
        small = value.layout is torch.strided and value.nbytes <= COPIED_BYTES
        return partial(_fill_tensor, value, value.clone(), value._version) if small else None
    return None


def _fill_tensor(value: Tensor, content: Tensor, version: int) -> None:
    """Writes only if the tensor was written to: torch counts writes, and a graph may have saved the tensor."""
    if value._version != version:
        value.detach().copy_(content)


def _content(cell: types.CellType) -> tuple[Any, ...]:
    """The value of a closure's variable; empty before the variable is assigned."""
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
    """Restore the items of a container, unless they are the same: some containers refuse to be changed."""
    if isinstance(value, dict):
        same = [*map(id, value), *map(id, value.values())] == [*map(id, content), *map(id, content.values())]
    else:
        same = [*map(id, value)] == [*map(id, content)]
    if not same:
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(content)


# --- in a fork --------------------------------------------------------------------------------------------------------


class ForkError(RuntimeError):
    """The call failed in the fork; the message is the type and the first line of its exception."""


def in_fork(work: Callable[[], T], seconds: float = 60.0) -> T:
    """The result of ``work()`` in a fork, pickled. ForkError: it failed, took longer than ``seconds``, or has ended."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, send), daemon=True)
    with receive, _restored_offsets():
        process.start()
        send.close()
        try:
            if not receive.poll(seconds):  # a lock that another thread held when forking is never released
                raise ForkError(f"no answer within {seconds:g} seconds")
            fine, answer = pickle.loads(receive.recv_bytes())
        except EOFError:
            raise ForkError("the process that was forked for it has ended") from None
        finally:
            process.kill()
            process.join()
    if not fine:
        raise ForkError(answer)
    found: T = answer
    return found


def _answer(work: Callable[[], Any], send: Any) -> None:
    """Run ``work`` in the fork and send its result."""
    torch.set_num_threads(1)  # a fork has no thread pool
    answer = io.BytesIO()
    try:
        _Pickler(answer).dump((True, work()))
    except BaseException as error:
        answer = io.BytesIO(pickle.dumps((False, first_line(error))))
    send.send_bytes(answer.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles small views of large tensors without the rest of their storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        return value.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


@contextmanager
def _restored_offsets() -> Iterator[None]:
    """Restore the offsets of files that are open for reading."""
    offsets: dict[int, int] = {}
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the descriptor that listed the folder is closed by now
            reads = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if reads and stat.S_ISREG(os.fstat(number).st_mode):
                offsets[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, offset in offsets.items():
            with suppress(OSError):
                os.lseek(number, offset, os.SEEK_SET)
