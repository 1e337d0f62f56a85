"""The accelerator of this machine, whatever it is: what ``torch.accelerator`` does not say.

Streams, events, memory statistics and waiting have calls that are the same for all accelerators (``torch.accelerator``,
``torch.Stream``, ``torch.Event``), and everybody uses those. What has no such call is here, one row per kind of device.
This is the only file that names ``torch.cuda``.

Invariant. A kind of device without a row trains with the same results: what is missing costs time, never bits.
Registering host memory is such a thing: where it cannot be done, copies make the host wait.

Refused: Apple's ``mps``, which has no streams: it is not seen, and the CPU is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

WITHOUT_STREAMS = {"mps"}


class Driver(Protocol):
    """Who locks host memory for copies."""

    def register(self, pointer: int, num_bytes: int) -> str | None:
        """Lock it; what went wrong, by name, or None."""

    def unregister(self, pointer: int) -> None:
        """The opposite."""


class CudaRuntime:
    """CUDA's runtime, as far as torch shows it; in a ROCm build of torch the same names call HIP."""

    def register(self, pointer: int, num_bytes: int) -> str | None:
        """See ``Driver``."""
        runtime = torch.cuda.cudart()
        failed = runtime.cudaHostRegister(pointer, num_bytes, 0)
        if not int(failed):
            return None
        _clear_last_error()
        return f"{runtime.cudaGetErrorString(failed)} (CUDA error {int(failed)})"

    def unregister(self, pointer: int) -> None:
        """See ``Driver``."""
        if int(torch.cuda.cudart().cudaHostUnregister(pointer)):
            _clear_last_error()


def _clear_last_error() -> None:
    """What failed is said; without this the next kernel would say it again. Torch clears it as it raises."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of device.

    Attributes:
        driver: locks a mapping of host memory; None: torch shows no call for it.
        software: what it runs on, with its version.
    """

    driver: Driver | None = None
    software: Callable[[], str] = lambda: ""


def _cuda_or_rocm() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


TABLE: dict[str, Row] = {
    "cuda": Row(CudaRuntime(), _cuda_or_rocm),
    "xpu": Row(software=lambda: f"XPU {torch.version.xpu}"),
}


def row_of(device: torch.device) -> Row:
    """What is known of ``device``'s kind; an empty row for kinds that are not in the table."""
    return TABLE.get(device.type, Row())


def kind() -> str | None:
    """The kind of accelerator that this machine has, as torch names it; None where there is only the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in WITHOUT_STREAMS else found.type


def current() -> torch.device | None:
    """The device that this process computes on, with its index; None where there is only the CPU."""
    found = kind()
    return None if found is None else torch.device(found, torch.accelerator.current_device_index())


def device_of(wanted: torch.device | str | None) -> torch.device:
    """``wanted`` with its index; by default the accelerator, else the CPU.

    Raises:
        ValueError: this machine has no such device, or it has no streams.
    """
    device = (current() or torch.device("cpu")) if wanted is None else torch.device(wanted)
    if device.type == "cpu":
        return device
    if device.type != kind() or (device.index or 0) >= torch.accelerator.device_count():
        raise ValueError(f"device={str(wanted)!r}: here are {', '.join(_devices())}")
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


def _devices() -> list[str]:
    found = kind()
    return ["cpu"] + [f"{found}:{index}" for index in range(torch.accelerator.device_count() if found else 0)]


def name_of(device: torch.device) -> str:
    """The product's name, as the driver says it; the kind of device where its module does not say it."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
