"""The switches and counts of the fake CUDA, for tests that run under it (``make test-cuda``). See README.md.

They have the names of the simulated device's (``tests/helpers/simulated``).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CONTEXT_BYTES = 500 << 20  # as in memory.cpp
PAGEABLE = "an asynchronous copy from or to pageable memory: the host waits for it"


def is_here() -> bool:
    """Whether this process runs under it."""
    return hasattr(ctypes.CDLL(None), "fake_counts")


class Fake:
    """Its switches and counts. RuntimeError if this process runs without it."""

    def __init__(self) -> None:
        if not is_here():
            raise RuntimeError("this process runs without the fake CUDA: make test-cuda")
        self._library = ctypes.CDLL(None)
        for name in ("fake_counts", "fake_complaints"):
            getattr(self._library, name).restype = ctypes.c_char_p

    def delay(self, copies_us: int, kernels_us: int) -> None:
        """The longest random delays of copies and of kernels, in microseconds."""
        self._library.fake_delay(copies_us, kernels_us)

    def slow(self, stream: torch.cuda.Stream, us: int) -> None:
        """How much longer each piece of work on ``stream`` takes, in microseconds."""
        self._library.fake_slow(ctypes.c_void_p(stream.cuda_stream), us)

    def limit(self, num_bytes: int, index: int = 0) -> None:
        """How many bytes tensors may have on a device; 0: as ``FAKE_CUDA_BYTES`` says.

        Torch's allocator keeps what it has, and may give that out again, which is small.
        """
        if num_bytes:
            torch.cuda.empty_cache()
            kept = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
            num_bytes += kept + CONTEXT_BYTES
        self._library.fake_limit(index, ctypes.c_size_t(num_bytes))

    def counts(self) -> dict[str, int]:
        """How often something happened: ``async_copies``, ``sync_copies``, ``async_kernels``, ``sync_kernels``, and
        ``events`` and ``registrations`` made; how many ranges are ``registered``."""
        kinds = ("async_copies", "sync_copies", "async_kernels", "sync_kernels", "events", "registrations")
        return dict.fromkeys(kinds, 0) | _lines(self._library.fake_counts())

    def complaints(self) -> dict[str, int]:
        """What a GPU refuses, or what costs more than its author meant to pay, and how often it happened."""
        return _lines(self._library.fake_complaints())


def _lines(text: bytes) -> dict[str, int]:
    return {what: int(number) for number, what in (line.split(" ", 1) for line in text.decode().splitlines())}


def complaints(library: Any) -> dict[str, int]:
    """Those of ``library`` that are mistakes, if it is this fake: pageable memory only costs time."""
    found: dict[str, int] = library.complaints() if isinstance(library, Fake) else {}
    found.pop(PAGEABLE, None)
    return found
