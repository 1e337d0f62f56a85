"""What this machine's accelerator can do beyond ``torch.accelerator``, one row of a table per kind of device.

What has no call that is the same for all accelerators is here, and this is the only file that names ``torch.cuda``. A
kind of device without a row trains with the same results: where host memory cannot be registered, copies make the host
wait. Apple's ``mps`` has no streams; it is ignored, and training runs on the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepstow.strategies.core.sizes import CONTEXT_BYTES

WITHOUT_STREAMS = {"mps"}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch's own


class Driver:
    """Registers host memory for copies: locks its pages and makes it known to the device. By CUDA's runtime, as far as
    torch exposes it; in a ROCm build of torch the same names call HIP.
    """

    def register(self, pointer: int, num_bytes: int) -> str | None:
        """Register a range; returns the error as text, or None."""
        runtime = torch.cuda.cudart()
        failed = runtime.cudaHostRegister(pointer, num_bytes, 0)
        if not int(failed):
            return None
        _clear_last_error()
        return f"{runtime.cudaGetErrorString(failed)} (CUDA error {int(failed)})"

    def unregister(self, pointer: int) -> None:
        """Undo ``register`` for the range that begins at ``pointer``."""
        if int(torch.cuda.cudart().cudaHostUnregister(pointer)):
            _clear_last_error()


def _clear_last_error() -> None:
    """Clear the error that was reported, or the next kernel would report it again. Torch clears it as it raises."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _expand_segments(device: torch.device) -> None:
    """Let torch's allocator lengthen its segments, so that rows of different length leave no gaps that nothing fits."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None or torch.version.hip or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return
    change("expandable_segments:True")
    try:
        torch.empty(1, device=device)
    except RuntimeError:  # the driver has no virtual memory
        change("expandable_segments:False")


def _limit(device: torch.device, num_bytes: int) -> None:
    """Torch's allocator gets ``num_bytes`` less what this process has outside of it, or will have."""
    free, total = torch.accelerator.get_memory_info(device)
    outside = total - free - torch.accelerator.memory_reserved(device)
    allowed = max(0, num_bytes - max(outside, CONTEXT_BYTES))
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)


def _nothing(*given: object) -> None:
    """For devices of which torch's allocator has no such setting."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of device."""

    driver: Driver | None = None  # None: torch exposes no call that registers host memory
    software: Callable[[], str] = lambda: ""  # the name and version of what the device runs on
    expand_segments: Callable[[torch.device], None] = _nothing  # of torch's allocator; not where the user has set it
    limit: Callable[[torch.device, int], None] = _nothing  # the bytes of a device that this process may use in all


TABLE: dict[str, Row] = {
    "cuda": Row(
        Driver(),
        lambda: f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        _expand_segments,
        _limit,
    ),
    "xpu": Row(software=lambda: f"XPU {torch.version.xpu}"),
}


def row_of(device: torch.device) -> Row:
    """The row of ``device``'s kind; an empty one for kinds that are not in the table."""
    return TABLE.get(device.type, Row())


def kind() -> str | None:
    """The kind of accelerator that this machine has, as torch names it; None if there is only the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type in WITHOUT_STREAMS else device.type


def current() -> torch.device | None:
    """The device that this process computes on, with its index; None if there is only the CPU."""
    device_type = kind()
    return None if device_type is None else torch.device(device_type, torch.accelerator.current_device_index())


def device_of(wanted: torch.device | str | None) -> torch.device:
    """``wanted`` with its index; by default the accelerator, else the CPU. ValueError if this machine has no such
    device.
    """
    device = (current() or torch.device("cpu")) if wanted is None else torch.device(wanted)
    if device.type == "cpu":
        return device
    if device.type != kind() or (device.index or 0) >= torch.accelerator.device_count():
        devices = ["cpu", *(f"{kind()}:{index}" for index in range(torch.accelerator.device_count() if kind() else 0))]
        raise ValueError(f"device={str(wanted)!r}: this machine has {', '.join(devices)}")
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


def name_of(device: torch.device) -> str:
    """The product's name from the driver; the kind of device if its torch module has no such call."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
