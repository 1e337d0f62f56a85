"""Tiers beyond the host's memory: what can keep optimizer state that visits the host for its update.

To add one, write a row of ``STORES`` in ``strategies/core/on_disk.py`` (what it is called, whether weights may rest
there, its rates) and a ``Store`` here. ``strategies.offload.disk`` names it by its scheme, as tcp://host:port; places,
plans, window, checksums, errors and rates follow from the row and the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from torch import Tensor

from deepstow.strategies.core.on_disk import part_bytes, scheme_of
from deepstow.strategies.engine.memory.scratch_file import STATE, ScratchFile, Store

MOST_MOVES = 4  # that one store is given at once, before others wait
KINDS: Mapping[str, type[Store]] = {"": ScratchFile}  # by scheme


class Striped:
    """A store in each of several places, each on a drive of its own, as if they were one: what is read and written is
    divided evenly (``part_bytes``), and its parts move at the same time. Raise ValueError like ``Store``.
    """

    def __init__(self, places: Sequence[str], num_bytes: int, what: str = STATE, *, checked: bool = True) -> None:
        """``num_bytes`` are those of each store; offsets too are those in each."""
        self._threads = ThreadPoolExecutor(MOST_MOVES * len(places), "stow-drive")
        self._stores = list[Store]()
        for place in places:
            try:
                self._stores.append(KINDS[scheme_of(place)](place, num_bytes, what, checked=checked))
            except (ValueError, OSError) as error:
                self.close()
                raise ValueError(f"{place}: {error}" if len(places) > 1 else str(error)) from None

    def read(self, memory: Tensor, offset: int) -> None:
        self._on_each(Store.read, memory, offset)

    def write(self, memory: Tensor, offset: int) -> None:
        self._on_each(Store.write, memory, offset)

    def on(self, drive: int) -> ScratchFile:
        """The one that has whole weights, which are mapped."""
        file = self._stores[drive]
        assert isinstance(file, ScratchFile)
        return file

    def _on_each(self, move: Callable[[Store, Tensor, int], None], memory: Tensor, offset: int) -> None:
        first, *others = zip(self._stores, memory.split(part_bytes(memory.nbytes, len(self._stores))), strict=False)
        moving = [self._threads.submit(move, *other, offset) for other in others]
        try:
            move(*first, offset)
        finally:
            wait(moving)  # also after an error: nobody else may have the memory before
        for future in moving:
            future.result()

    def close(self) -> None:
        self._threads.shutdown()
        for store in self._stores:
            store.close()


def unsuitable(place: str) -> str:
    """Why ``place`` cannot have a store; empty if nothing is known against it."""
    return KINDS[scheme_of(place)].unsuitable(place)
