"""Parameters on loan (``saving/state_dict.py``): plain ones for a while, with memory of their own.

Two things need them: ``optimizer.present``, inside of which user code reads and writes weights as in plain torch, and
modules that customize their state dict. A parameter on loan shows a copy on the device, or its home if it is resident.
Until the loan ends forward, ``state_dict`` and ``load_state_dict`` use its value; then a value that differs becomes the
new weight. Meanwhile no update may begin: ``step`` is refused, and so is a backward that updates. Writes, after the
loan, to tensors that share memory with a copy are not seen.

[Note: state dicts] A state dict is views of the host's copies, so that saving a model needs no second one in memory.
Where a gradient waits in the copy's place (``parks_in_copy``), a view would show the gradient after the next backward.
So before that each view that somebody still holds gets memory of its own, which the plan does not have. Other tensors
made of such a view (``detach``, slices) cannot be given any, and to hold them during backward is refused.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.engine.tensors.parameters import RAW_DATA, StowedParameter


class LentParameter(StowedParameter):
    """A parameter on loan; its gradient is where it was."""

    @property
    def data(self) -> Tensor:
        value: Tensor = RAW_DATA.__get__(self)
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"{self._keeper.name}: {value.dtype} {list(value.shape)} on {value.device} assigned to a parameter "
                f"that is {self.dtype} {list(self.shape)} on {self.device}; the memory of a stowed model is planned"
            )
        RAW_DATA.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.data.clone(), self.requires_grad)


class HandedOut:
    """The views of one bucket's copy on the host that state dicts have given out; see [Note: state dicts]."""

    def __init__(self) -> None:
        self._views: list[tuple[weakref.ref[Tensor], StorageWeakRef]] = []

    def add(self, view: Tensor) -> None:
        """``view``, which has a storage of its own, is given out. What is not held any more is forgotten."""
        self._views = [known for known in self._views if not known[1].expired()]
        if view.numel():
            self._views.append((weakref.ref(view), StorageWeakRef(view.untyped_storage())))

    def keep_values(self, name: str) -> None:
        """Give every view that is still held its own memory: the copy of bucket ``name`` is about to be overwritten."""
        held, self._views = [known for known in self._views if not known[1].expired()], []
        for view, _ in held:
            tensor = view()
            if tensor is not None:
                tensor.data = tensor.data.clone()
                del tensor
        if any(not storage.expired() for _, storage in held):
            gc.collect()  # what only a cycle holds is held by nobody
        if any(not storage.expired() for _, storage in held):
            raise RuntimeError(
                f"{name}: a part of what model.state_dict() returned is held during backward, which writes gradients "
                f"to that memory: clone() what is to be kept, or drop it before"
            )
