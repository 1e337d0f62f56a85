"""Run the engine's own operators outside of all dispatch modes.

Torch's selective checkpoints are modes that number the operators of a forward and expect the same ones in the replay.
What the engine does when a module is entered or left depends on where weights are then, so it may not be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")


def unseen(work: Callable[P, R]) -> Callable[P, R]:
    """``work``, to be run without gradients and outside of all dispatch modes."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            if not torch._C._len_torch_dispatch_stack():  # nearly always
                return work(*args, **kwargs)
            with _disable_current_modes():
                return work(*args, **kwargs)

    return run
