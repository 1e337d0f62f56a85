"""The arenas: one stretch of device memory and one of host memory, reserved once. Nothing else here allocates.

Problem. A caching allocator rounds up, fragments, and gives memory to whoever asks first; torch's pinned allocator
rounds to powers of two, so that 20 GiB become 32. A plan that knows every address needs none of that.

Device: one ``torch.empty``. Host: one anonymous mapping of the exact size (huge pages where the kernel grants them),
registered with CUDA in pieces (``pin``), because one registration of hundreds of gigabytes fails. Without CUDA both
arenas are ordinary memory, the same code runs, and every rule about addresses is tested on any machine.

Invariant. ``device_bytes`` and ``host_bytes`` never change after construction; a region is a view, never a copy.

Refused: more bytes than there are, with the numbers, before the kernel ends the process.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from strategies.core.layout import Addresses, Item, Spot
from strategies.core.plan import Home
from strategies.core.render import human

PIECE_BYTES = 16 << 30  # one registration; above 64 GiB some drivers refuse


class OutOfMemoryError(RuntimeError):
    """An arena could not be reserved."""


class Pages:
    """One mapping of host memory of the exact size, zero as it comes; ``memory`` is all of it, flat.

    Raises:
        OutOfMemoryError: the host has not that much; ``owner`` says who wanted it.
    """

    def __init__(self, num_bytes: int, owner: str) -> None:
        self.memory = self._reserve(num_bytes, owner)
        self._registered: list[int] = []

    def pin(self) -> None:
        """Lock the pages in memory, so that copies run beside compute.

        Raises:
            OutOfMemoryError: the driver refuses.
        """
        start, total = self.memory.data_ptr(), self.memory.numel()
        for offset in range(0, total, PIECE_BYTES):
            size = min(PIECE_BYTES, total - offset)
            failed = int(torch.cuda.cudart().cudaHostRegister(start + offset, size, 0))
            if failed:
                self.unpin()
                raise OutOfMemoryError(f"could not pin {human(total)} of host memory (CUDA error {failed})")
            self._registered.append(start + offset)

    def unpin(self) -> None:
        """Give the pages back to the system's care. Views stay valid."""
        for pointer in self._registered:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()

    @staticmethod
    def _reserve(num_bytes: int, owner: str) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"{owner} needs {human(num_bytes)} of host memory: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive


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
        """Lock the host arena in memory. Nothing to do without CUDA.

        Called when the weights have moved in and the model's own memory is free again: pinning takes every page at
        once, and until then the pages of the moments are not there. So the model never exists twice beside the arena.

        Raises:
            OutOfMemoryError: the driver refuses.
        """
        if self.device.type == "cuda":
            self._host.pin()

    def _reserve_device(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, RuntimeError on the CPU
            raise OutOfMemoryError(f"the device arena needs {human(num_bytes)}: {error}") from None


def alone(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own.

    Libraries take tensors that share a storage for tied weights; views of an arena share one and are not tied.
    """
    return from_dlpack(view.detach()) if view.numel() else view.detach()
