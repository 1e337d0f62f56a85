"""A bucket's masters and moments, a stretch of its span at a time: all of it where they are in memory, else what one
slot of the window holds of what rests on the disk (``disk_state.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

from torch import Tensor

AtHand: TypeAlias = Callable[..., AbstractContextManager[None]]


class Stretch(NamedTuple):
    """Elements ``start`` to ``stop`` of a rank's span: flat views of their masters, None if they have none, and of
    their moments. On the disk they have their values inside of ``at_hand()``, and keep what is written inside of
    ``at_hand(writes=True)``; ``DiskState.held`` has the options.
    """

    start: int
    stop: int
    master: Tensor | None
    moments: list[Tensor]
    at_hand: AtHand

    def of_masters(self, span: Tensor) -> Stretch:
        """With its part of ``span``, which all are in, as its masters."""
        return self._replace(master=span[self.start : self.stop])


def in_memory(*, writes: bool = False, behind: bool = False) -> AbstractContextManager[None]:
    """What rests in memory is always at hand."""
    return nullcontext()
