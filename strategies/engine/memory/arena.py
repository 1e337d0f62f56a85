"""The arenas: one stretch of memory per tier, reserved once. Nothing else in the engine allocates buffers.

A caching allocator rounds up and fragments, and torch's pinned one makes 32 GiB of 20. A plan has every address.

    device   one ``torch.empty``
    host     one anonymous mapping of the exact size (huge pages where the kernel grants them), registered with the
             accelerator's driver in pieces, because one registration of hundreds of gigabytes fails. What ranks of one
             machine read from each other comes first, in a mapping of its own (``common_host.py``)

Without an accelerator both are ordinary memory and the same code runs. The arenas do not grow, shrink or move; a region
is a view, never a copy. ``tests/unit/test_one_allocator.py`` lists what else allocates, and why.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import PAGE_BYTES, Addresses, Item, Spot
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.accelerator import Driver, row_of

logger = logging.getLogger(__name__)
PIECE_BYTES = 16 << 30  # one registration; above 64 GiB some drivers refuse
TIERS = (Tier.DEVICE, Tier.HOST)


class OutOfMemoryError(RuntimeError):
    """An arena could not be reserved."""


class HostMemory:
    """One mapping of host memory of the exact size, zero as it comes, to be pinned for ``device``; of ``file``, a
    descriptor, if other processes map it too.
    """

    def __init__(self, num_bytes: int, device: torch.device, owner: str, file: int | None = None) -> None:
        self._device = device
        self._owner = owner
        self.borders: list[int] = []  # offsets that no copy may cross
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._mapping: Any = None
        if num_bytes:
            try:
                self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if file is not None:  # of which the system would map more than there is
                    self._mapping.close()
                    self._mapping = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED)
            except OSError as error:
                raise OutOfMemoryError(f"{owner} needs {human(num_bytes)} of host memory: {error}") from None
            self._advise("MADV_HUGEPAGE")
            self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)  # keeps the mapping alive
        self._registered: list[tuple[Driver, int]] = []
        self._unpin = weakref.finalize(self, _unregister, self._registered)  # memory that is unmapped while it is
        self._unpin.atexit = False  # registered spoils the next registration there; the driver ends with the process

    def pin(self, starts: Iterable[int]) -> None:
        """Lock the pages in memory, so that copies run beside compute, and keep them from forked processes.

        Drivers refuse a copy whose range lies in two registrations. So a registration begins only at an offset in
        ``starts``, of which none is copied together with the bytes before it. A forked process (a data loader's) would
        share these pages until somebody writes to them, after which the device may go on with the copy that the writer
        does not have. So a fork gets none of them.
        """
        driver, total = row_of(self._device).driver, self.memory.numel()
        if driver is None:
            if self._device.type != "cpu":
                kind = self._device.type
                logger.warning("torch cannot register host memory with %s: copies make the host wait", kind)
            return
        self.borders = list(_borders(total, starts))
        self._advise("MADV_DONTFORK")
        for begin, end in pairwise([0, *self.borders, total] if total else []):
            complaint = driver.register(self.memory.data_ptr() + begin, end - begin)
            if complaint:
                self.release()
                raise OutOfMemoryError(f"could not pin {human(total)} of host memory for {self._owner}: {complaint}")
            self._registered.append((driver, self.memory.data_ptr() + begin))

    def release(self) -> None:
        _unregister(self._registered)
        self._advise("MADV_DOFORK")

    def _advise(self, name: str) -> None:
        if self._mapping is not None and hasattr(mmap, name):
            self._mapping.madvise(getattr(mmap, name))


def _unregister(registered: list[tuple[Driver, int]]) -> None:
    while registered:
        driver, pointer = registered.pop()
        driver.unregister(pointer)


def _borders(total: int, starts: Iterable[int]) -> Iterator[int]:
    """Where registrations meet: at most PIECE_BYTES apart, unless no start lies between."""
    begin, last = 0, 0
    for start in [*sorted(start for start in set(starts) if start % PAGE_BYTES == 0), total]:
        if start - begin > PIECE_BYTES and last > begin:
            yield last
            begin = last
        last = start


class Arena:
    """The arenas of one rank, one per tier, cut up as ``addresses`` says. ``common``: the first bytes of the host's, if
    they are memory that other ranks read.
    """

    def __init__(self, addresses: Addresses, device: torch.device, common: Tensor | None = None) -> None:
        self.addresses = addresses
        self._common = common
        self._first = 0 if common is None else common.numel()
        device_owner, host_owner = (f"the {tier.value} arena ({self._contents(tier)})" for tier in TIERS)
        num_bytes = self.num_bytes(Tier.DEVICE)
        try:
            self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on accelerators, RuntimeError on the CPU
            raise OutOfMemoryError(f"{device_owner} needs {human(num_bytes)}: {error}") from None
        self._host = HostMemory(self.num_bytes(Tier.HOST) - self._first, device, host_owner)

    def num_bytes(self, tier: Tier) -> int:
        return self.addresses.num_bytes(tier)

    def of(self, bucket: str, item: Item, dtype: torch.dtype) -> Tensor | None:
        """The flat view of one item of one bucket, in whole elements; None if the layout gives it no memory."""
        spot = self.addresses.spots.get((bucket, item))
        if spot is None:
            return None
        if spot.tier is Tier.DEVICE:
            return self._device[spot.offset : spot.end].view(dtype)
        if self._common is not None and spot.offset < self._first:
            return self._common[spot.offset : spot.end].view(dtype)
        return self._host.memory[spot.offset - self._first : spot.end - self._first].view(dtype)

    def borders(self, spot: Spot) -> list[int]:
        """Offsets in ``spot`` on the host that no copy may cross."""
        borders = [border + self._first for border in self._host.borders]
        return [border - spot.offset for border in borders if spot.offset < border < spot.end]

    def owners(self) -> Iterator[str]:
        """What each arena holds, by kind of memory, as lines for people."""
        for tier in self.addresses.arena_bytes:
            yield f"{tier.value} arena {human(self.num_bytes(tier))}: {self._contents(tier)}"

    def pin(self) -> None:
        """Pin the host's arena if the driver needs it, without what other ranks read.

        Called when the weights have moved in and the model's own memory is free again: pinning takes every page at
        once, and until then the pages of the moments are not there. So the model never exists twice beside the arena.
        """
        starts = set[int]()
        for (_, item), spot in self.addresses.spots.items():
            if spot.tier is Tier.HOST and spot.offset >= self._first:
                step = PIECE_BYTES if item is Item.SAVED else max(spot.num_bytes, 1)  # those keep to ``borders``
                starts.update(range(spot.offset - self._first, spot.end - self._first, step))
        self._host.pin(starts)

    def close(self) -> None:
        """Give pinned pages back to the system. The views stay valid, the pages are pageable again."""
        self._host.release()

    def _contents(self, tier: Tier) -> str:
        """The kinds of memory at one tier with their sizes, largest first. Shared slots count once."""
        spots = {(item, spot) for (_, item), spot in self.addresses.spots.items() if spot.tier is tier}
        sizes: Counter[str] = Counter()
        for item, spot in spots:
            sizes[item.value] += spot.num_bytes
        return ", ".join(f"{name} {human(size)}" for name, size in sizes.most_common()) or "empty"


def alone(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage and a count of writes of its own: libraries take tensors that share a
    storage for tied weights. Kinds of device that are registered with torch have no DLPack, and keep the arena's.
    """
    has_dlpack = view.numel() and view.device.type != torch._C._get_privateuse1_backend_name()
    if not has_dlpack:
        return view.data
    on_device = torch.accelerator.device_index(view.device.index) if view.is_cuda else nullcontext()  # torch asks it
    with on_device:
        return from_dlpack(view.detach())
