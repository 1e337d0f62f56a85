"""What is alive of what forward made: its own storages, those of a replay and what comes back from the host for it, not
those of backward itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.engine.module_hooks import tensors_in


class Live(TorchDispatchMode):
    """Follows storages by weak references. ``peak`` is the most that was alive at any operator of backward."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs or {}])}
        out = func(*args, **(kwargs or {}))
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not torch.is_grad_enabled() and func is not torch.ops.aten.empty_strided.default:
            if func is torch.ops.aten.detach.default:
                return out  # a replay saves a tensor: what it works on is there, too, and goes
            self.peak = max(self.peak, self.num_bytes)
            return out
        self._follow(out, known)
        return out

    def _follow(self, out: Any, known: Collection[int]) -> None:
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    @property
    def num_bytes(self) -> int:
        """Alive now."""
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}
        return sum(size for _, size in self._made.values())


class Everything(Live):
    """Follows all storages that operators make, in backward as well; ``peak`` is the most that was alive after any."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs or {}])}
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.num_bytes)  # forgets what is gone, whose numbers may be given again
        self._follow(out, given | self._made.keys())
        self.peak = max(self.peak, self.num_bytes)
        return out
