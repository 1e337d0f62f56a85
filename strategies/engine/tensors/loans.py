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

[Note: edits] In plain torch to write to what a state dict has is to write to the weights. Torch's count of writes to a
value shows it, also when nobody holds the value any more. Before weights are used or replaced, such a write becomes the
newest weight everywhere. It is refused if an update has come between, or if the value was a copy that is gone.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from deepstow.strategies.engine.tensors.parameters import RAW_DATA, WRITE, StowedParameter


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

    def set_(self, source: Tensor) -> Any:  # type: ignore[override]
        self.data = source
        return self

    untyped_storage = Tensor.untyped_storage
    storage = Tensor.storage
    __dlpack__ = Tensor.__dlpack__

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.data.clone(), self.requires_grad)


class Shown:
    """A value of parameter ``index`` that a state dict has given out, and the bucket's count of replacements then.
    ``is_copy``: it is not the memory in which the weight rests.
    """

    def __init__(self, view: Tensor, index: int, replaced: int, *, is_copy: bool) -> None:
        self.index = index
        self.replaced = replaced
        self.is_copy = is_copy
        is_alone = view.untyped_storage().nbytes() == view.nbytes
        self._view, self._storage = weakref.ref(view), StorageWeakRef(view.untyped_storage()) if is_alone else None
        self._counter = view.detach()  # has the view's count of writes, and none of its memory
        self._counter.data = view.new_empty(0)
        self._known = self._counter._version

    @property
    def view(self) -> Tensor | None:
        return self._view()

    @property
    def is_held(self) -> bool:
        """Whether somebody can still write to it."""
        return self.shares or self._view() is not None

    @property
    def shares(self) -> bool:
        """Whether a tensor has the storage that it was given out with."""
        return self._storage is not None and not self._storage.expired()

    @property
    def edited(self) -> bool:
        return self._counter._version != self._known

    def follow(self, replaced: int) -> None:
        """It shows the weight that the former one was replaced with."""
        self.replaced = replaced

    def take(self) -> None:
        """What was written becomes the newest weight."""
        self._known = self._counter._version


class HandedOut:
    """The views of one bucket's weights that state dicts have given out; see [Note: state dicts], [Note: edits]."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._all: list[Shown] = []

    def add(self, view: Tensor, index: int, replaced: int, *, is_copy: bool) -> None:
        """``view`` is given out."""
        if view.numel():
            self._all.append(Shown(view, index, replaced, is_copy=is_copy))

    def edits(self, replaced: int) -> list[Shown]:
        """Those that were written to, which the caller makes the weights. What nobody holds any more is forgotten."""
        if not self._all:  # nearly always
            return []
        edited = [shown for shown in self._all if shown.edited]
        self._all = [shown for shown in self._all if shown.is_held]
        for shown in edited:
            if shown.replaced != replaced or (shown.is_copy and shown.view is None):
                self._refuse(shown)
            shown.take()
        return edited

    def refuse_edits(self) -> None:
        """At the end of a forward, at whose begin none was left: a weight that was there before may be the old one."""
        for shown in self._all:
            if shown.edited:
                raise RuntimeError(
                    f"{self._names[shown.index]}: a value of state_dict() was written to inside of a forward; write to "
                    f"it before or after, or under `with optimizer.present([parameter]):`"
                )

    def renew(self, former: int, replaced: int) -> None:
        """What is no copy shows the weights with which the former ones were replaced."""
        for shown in self._all:
            if shown.replaced == former and not shown.is_copy:
                shown.follow(replaced)

    def keep_values(self, name: str) -> None:
        """Give every view that is still held its own memory: the copy of bucket ``name`` is about to be overwritten."""
        originals = [shown for shown in self._all if not shown.is_copy]
        for shown in originals:
            if shown.edited:
                self._refuse(shown)
        views = [(shown.view, shown) for shown in originals if shown.view is not None]
        for tensor, _ in views:
            tensor.data = tensor.data.clone()
        others = [shown for shown in self._all if shown.is_copy]
        self._all = others + [Shown(tensor, shown.index, shown.replaced, is_copy=True) for tensor, shown in views]
        del views
        if any(shown.shares for shown in originals):
            gc.collect()  # what only a cycle holds is held by nobody
        if any(shown.shares for shown in originals):
            raise RuntimeError(
                f"{name}: a part of what model.state_dict() returned is held during backward, which writes gradients "
                f"to that memory: clone() what is to be kept, or drop it before"
            )

    def _refuse(self, shown: Shown) -> NoReturn:
        raise RuntimeError(
            f"{self._names[shown.index]}: what model.state_dict() had of it was written to, and is a copy, or older "
            f"than the weight; {WRITE}"
        )
