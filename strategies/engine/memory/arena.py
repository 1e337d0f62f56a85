"""The arenas: one stretch of device memory and one of host memory, reserved once. Nothing else here allocates.

Problem. A caching allocator rounds up, fragments, and gives memory to whoever asks first; torch's pinned allocator
rounds to powers of two, so that 20 GiB become 32. A plan that knows every address needs none of that.

Device: one ``torch.empty``. Host: one anonymous mapping of the exact size (huge pages where the kernel grants them),
registered with the accelerator's driver in pieces (``pin``), because one registration of hundreds of gigabytes fails;
no stretch of a plan lies in two of them. Without an accelerator both arenas are ordinary memory, the same code runs,
and every rule about addresses is tested on any machine.

Invariant. ``device_bytes`` and ``host_bytes`` never change after construction; a region is a view, never a copy.

Refused: more bytes than there are, with the numbers, before the kernel ends the process.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from strategies.core.layout import PAGE_BYTES, Addresses, Item, Spot
from strategies.core.plan import Home
from strategies.core.sizes import human
from strategies.engine.memory.accelerator import Driver, row_of

logger = logging.getLogger(__name__)
PIECE_BYTES = 16 << 30  # one registration; above 64 GiB some drivers refuse


class OutOfMemoryError(RuntimeError):
    """An arena could not be reserved."""


class Pages:
    """One mapping of host memory of the exact size, zero as it comes; ``memory`` is all of it, flat.

    Raises:
        OutOfMemoryError: the host has not that much; ``owner`` says who wanted it.
    """

    def __init__(self, num_bytes: int, owner: str) -> None:
        self._owner = owner
        self._mapping, self.memory = self._reserve(num_bytes, owner)
        self.borders: list[int] = []  # offsets at which one registration ends and the next begins
        self._registered: list[tuple[Driver, int]] = []
        self._unpin = weakref.finalize(self, _unregister, self._registered)  # memory that is unmapped while it is
        self._unpin.atexit = False  # registered spoils the next registration there; the driver ends with the process

    def pin(self, driver: Driver, starts: Sequence[int] = ()) -> None:
        """Lock the pages in memory, so that copies run beside compute, and keep them from forked processes.

        Drivers refuse a copy whose range lies in two registrations. So registrations end where a stretch of ``starts``
        begins, of which none is copied together with the one before it. Without ``starts`` whoever cuts the memory up
        has to keep to ``borders``.

        A process that is forked (a data loader's) would share these pages until somebody writes to them, whereupon the
        device may go on with the copy that the writer has not. So it gets none of them.

        Raises:
            OutOfMemoryError: the driver refuses.
        """
        total = self.memory.numel()
        self.borders = list(_borders(total, starts))
        if total and hasattr(mmap, "MADV_DONTFORK"):
            self._mapping.madvise(mmap.MADV_DONTFORK)
        for begin, end in pairwise([0, *self.borders, total] if total else []):
            complaint = driver.register(self.memory.data_ptr() + begin, end - begin)
            if complaint:
                self.unpin()
                raise OutOfMemoryError(f"could not pin {human(total)} of host memory for {self._owner}: {complaint}")
            self._registered.append((driver, self.memory.data_ptr() + begin))

    def pin_for(self, device: torch.device, starts: Sequence[int] = ()) -> None:
        """Lock the pages for copies to and from ``device``, as far as torch shows a way to; see ``pin``."""
        driver = row_of(device).driver
        if driver is not None:
            self.pin(driver, starts)
        elif device.type != "cpu":
            logger.warning("torch cannot register host memory with %s: copies make the host wait", device.type)

    def unpin(self) -> None:
        """Give the pages back to the system's care. Views stay valid."""
        _unregister(self._registered)
        if self._mapping is not None and hasattr(mmap, "MADV_DOFORK"):
            self._mapping.madvise(mmap.MADV_DOFORK)

    @staticmethod
    def _reserve(num_bytes: int, owner: str) -> tuple[Any, Tensor]:
        if num_bytes == 0:
            return None, torch.empty(0, dtype=torch.uint8)
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"{owner} needs {human(num_bytes)} of host memory: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages, torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive


def _unregister(registered: list[tuple[Driver, int]]) -> None:
    while registered:
        driver, pointer = registered.pop()
        driver.unregister(pointer)


def _borders(total: int, starts: Sequence[int]) -> Iterator[int]:
    """Where registrations meet: at most PIECE_BYTES apart, unless one stretch alone is larger."""
    begin, last = 0, 0
    for start in [*sorted(start for start in set(starts) if start % PAGE_BYTES == 0), total] if starts else ():
        if start - begin > PIECE_BYTES and last > begin:
            yield last
            begin = last
        last = start
    if not starts:
        yield from range(PIECE_BYTES, total, PIECE_BYTES)


class Arena:
    """Both arenas of one rank, cut up as ``addresses`` says.

    Raises:
        OutOfMemoryError: the device or the host has not that much; the message says who wanted what.
    """

    def __init__(self, addresses: Addresses, device: torch.device) -> None:
        self.addresses, self.device = addresses, device
        self._device = self._reserve_device(addresses.device_bytes)
        self._host = Pages(addresses.host_bytes, "the host arena")

    @property
    def device_bytes(self) -> int:
        return self._device.numel()

    @property
    def host_bytes(self) -> int:
        return self._host.memory.numel()

    def region(self, spot: Spot, dtype: torch.dtype) -> Tensor:
        """The flat view of ``spot``; as many elements as fit."""
        home = self._device if spot.home is Home.DEVICE else self._host.memory
        return home[spot.offset : spot.end].view(dtype)

    def of(self, bucket: str, item: Item, dtype: torch.dtype) -> Tensor | None:
        """The region of one item of one bucket; None where the layout gives it none."""
        spot = self.addresses.spots.get((bucket, item))
        return None if spot is None else self.region(spot, dtype)

    def owners(self) -> Iterator[str]:
        """What each arena holds, by kind of memory, as lines for people. Shared slots count once."""
        for home, total in ((Home.DEVICE, self.device_bytes), (Home.HOST, self.host_bytes)):
            spots = {(item, spot) for (_, item), spot in self.addresses.spots.items() if spot.home is home}
            held: Counter[str] = Counter()
            for item, spot in spots:
                held[item.value] += spot.num_bytes
            parts = ", ".join(f"{name} {human(size)}" for name, size in held.most_common())
            yield f"{home.value} arena {human(total)}: {parts or 'empty'}"

    def close(self) -> None:
        """Give pinned pages back to the system. The views stay valid, the pages are pageable again."""
        self._host.unpin()

    def pin(self) -> None:
        """Lock the host arena in memory. Nothing to do where no driver does that.

        Called when the weights have moved in and the model's own memory is free again: pinning takes every page at
        once, and until then the pages of the moments are not there. So the model never exists twice beside the arena.

        Raises:
            OutOfMemoryError: the driver refuses.
        """
        starts = [spot.offset for spot in self.addresses.spots.values() if spot.home is Home.HOST]
        self._host.pin_for(self.device, starts)

    def _reserve_device(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError on accelerators, RuntimeError on the CPU
            raise OutOfMemoryError(f"the device arena needs {human(num_bytes)}: {error}") from None


def alone(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own.

    Libraries take tensors that share a storage for tied weights; views of an arena share one and are not tied. Kinds of
    device that are registered with torch have no DLPack, and keep the arena's.
    """
    there = view.numel() and view.device.type != torch._C._get_privateuse1_backend_name()
    return from_dlpack(view.detach()) if there else view.detach()
