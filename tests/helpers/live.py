"""What is alive of the storages that operators make, in forward, in backward and in what both run again."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deepstow.strategies.engine.module_hooks import tensors_in


class Live(TorchDispatchMode):
    """Follows storages by weak references. ``peak`` is the most that was alive after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs or {}])}
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.num_bytes)  # forgets what is gone, whose numbers may be given again
        for storage in (tensor.untyped_storage() for tensor in tensors_in(out)):
            if storage._cdata not in given | self._made.keys():
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.num_bytes)
        return out

    @property
    def num_bytes(self) -> int:
        """Alive now."""
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}
        return sum(size for _, size in self._made.values())
