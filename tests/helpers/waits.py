"""What makes the host wait for a device, and who asks for it: the stack of each such call, of any library.

Three watchers, since each misses what the others see. Torch's own knows of reads of numbers and of blocking copies in
its C++. A dispatch mode sees every operator whose result, or the size of it, the host has to know, and every blocking
copy, also where a double of the device computes it. The profiler's hook sees ``synchronize`` of events, streams and
devices.

Threads that issue no operator while the watch lasts are not looked at: the engine's worker may wait.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REPO = Path(__file__).resolve().parents[2]
LIBRARIES = "site-packages/"
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
CALLS = {"synchronize", "_cuda_synchronize", "_accelerator_synchronizeDevice"}
MEASURED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)  # the host asks what the device has found
SAID_BY_TORCH = "called a synchronizing CUDA operation"


class Frame(NamedTuple):
    """A call of a stack. ``file`` is relative to this project, or to the folder of libraries."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class Wait:
    """``what`` made the host wait; ``stack``: who asked for it, the innermost call first."""

    what: str
    stack: tuple[Frame, ...]

    @property
    def caller(self) -> Frame:
        """The innermost call that is not torch's machinery; its scaler of losses is somebody who asks."""
        asks = (frame for frame in self.stack if not frame.file.startswith("torch/") or "grad_scaler" in frame.file)
        return next(asks, self.stack[-1])

    def __str__(self) -> str:
        return "\n    ".join([f"{self.what}, asked for by", *map(str, self.stack[:14])])


def _frames(frame: FrameType) -> tuple[Frame, ...]:
    found = []
    for each, line in traceback.walk_stack(frame):
        name = each.f_code.co_filename
        if name not in (__file__, warnings.__file__):
            name = name.rpartition(LIBRARIES)[2] if LIBRARIES in name else name.removeprefix(f"{REPO}/")
            found.append(Frame(name, each.f_code.co_name, line))
    return tuple(found)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Wait] = []
        self.active = True

    def add(self, what: str) -> None:
        self.found.append(Wait(what, _frames(sys._getframe(1))))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and sys.getprofile() is None:
            sys.setprofile(self.hook)  # also in the threads of backward
        given = kwargs or {}
        if (what := _asks(func, args, given)) is not None:
            self.add(what)
        return func(*args, **given)

    def hook(self, frame: FrameType, event: str, called: Any) -> None:
        if not self.active:
            sys.setprofile(None)
        elif event == "c_call" and getattr(called, "__name__", "") in CALLS and not isinstance(called, FunctionType):
            self.add(f"{called.__name__}()")

    def warned(self, message: Any, *rest: Any) -> None:
        if SAID_BY_TORCH in str(message):
            self.add("torch says so")


def _asks(func: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why this operator makes the host wait; None if it does not."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    there = [value for value in tensors if value.device.type not in ("cpu", "meta")]
    if func in COPIES:
        return _copies(func, args, kwargs)
    if not there or not any(tag in func.tags for tag in MEASURED):
        return None
    if func.overloadpacket is torch.ops.aten.index and not any(
        index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None
    ):
        return None
    if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    return str(func)


def _copies(func: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    to: Any = args[0].device if func is COPIES[0] else torch.device(kwargs.get("device") or args[0].device)
    source = args[1] if func is COPIES[0] else args[0]
    if (to.type == "cpu") == (source.device.type == "cpu") or source.numel() == 0:
        return None
    asynchronous = kwargs.get("non_blocking", args[2] if func is COPIES[0] and len(args) > 2 else False)
    host = source if source.device.type == "cpu" else args[0] if func is COPIES[0] else None  # a new one is pinned
    if asynchronous and (host is None or host.is_pinned()):
        return None
    how = f"of {source.numel()} elements, {source.device.type} to {to.type}"
    return f"a blocking copy {how}" if not asynchronous else f"a copy {how}, of memory that is not pinned"


@contextmanager
def watched() -> Iterator[list[Wait]]:
    """Yield what waits meanwhile, in the order in which it does."""
    watch = _Watch()
    with warnings.catch_warnings(), watch:
        warnings.simplefilter("always")
        warnings.showwarning = watch.warned
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        sys.setprofile(watch.hook)
        try:
            yield watch.found
        finally:
            watch.active = False
            sys.setprofile(None)
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def beyond(found: Iterable[Wait], listed: Mapping[tuple[str, str], str]) -> list[str]:
    """The waits whose caller (file and function) is not ``listed``, each with its stack and once."""
    return list(dict.fromkeys(str(each) for each in found if (each.caller.file, each.caller.function) not in listed))
