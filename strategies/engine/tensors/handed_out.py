"""Views of a host's copy that a state dict has given out, and that somebody may still hold.

Problem. A state dict is views of the hosts' copies, so that saving a model needs no second one in memory. Where a
gradient waits in the copy's place, such a view would show the gradient after the next backward. Nobody holds a state
dict that long in order to save it, but nothing keeps a loop from it.

So before the place is overwritten each view that is still held gets memory of its own, with the weight as it is then.
That is more memory than the plan has, and what was asked for: a state dict as it was when it was made.

Refused: other tensors that were made of these views and share their memory (``detach``, slices), since there is no way
to give them memory of their own.
"""

from __future__ import annotations

import gc
import weakref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class HandedOut:
    """The views of one bucket's copy that were given out."""

    def __init__(self) -> None:
        self._views: list[tuple[weakref.ref[Tensor], StorageWeakRef]] = []

    def add(self, view: Tensor) -> None:
        """``view``, which has a storage of its own, is given out. What is not held any more is forgotten."""
        self._views = [known for known in self._views if not known[1].expired()]
        if view.numel():
            self._views.append((weakref.ref(view), StorageWeakRef(view.untyped_storage())))

    def keep_values(self, name: str) -> None:
        """Give every view that is still held its own memory: the copy of bucket ``name`` is about to be overwritten.

        Raises:
            RuntimeError: a tensor made of a view is held and cannot be given any.
        """
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
