"""The host memory that ranks of one machine read from each other, and up to which update they may.

Consumer cards cannot copy to each other: what a rank gets over the network goes down from the other's device and up
again, although the host has had it from the start. So each rank maps the first part of the others' arenas, which has
the weights that rest or are updated on the host, and copies all spans up by itself.

Each rank makes one file that exists in memory only (``memfd_create``) and ends with the last process that has mapped
it; the others open it by way of ``/proc``. Behind the weights it has one number per bucket: how many times the rank's
span has been replaced, by an update or by a load, which all ranks count alike. What is read and written when is in
``strategies/engine/ranks/shares.py``, Note: common memory.

Refused: machines whose cores may reorder writes (x86 does not), since a number would be seen before the weights; and
ranks that do not see each other's processes.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from deepstow.strategies.core.facts import IN_ORDER, Tier
from deepstow.strategies.core.layout import Spot, aligned
from deepstow.strategies.engine.memory.arena import HostMemory
from deepstow.strategies.state.processes import started_at

POLL_S = 5e-5
LOOK_S = 0.5  # between looks at whether the others are alive
TOKEN_BYTES = 16
OWNER = "the part of the host arena that other ranks read"
CURE = "write strategies.offload.gather: network"


class CommonHost:
    """This rank's part of the memory that all read, ``num_bytes`` of weights at the start of its arena on the host, and
    after ``connect`` the others' parts.
    """

    def __init__(self, num_bytes: int, num_buckets: int, device: torch.device) -> None:
        if platform.machine() not in IN_ORDER:
            raise RuntimeError(
                f"ranks cannot read each other's memory: {platform.machine()} may reorder writes: {CURE}"
            )
        self._device = device
        self._size = num_bytes + aligned(8 * num_buckets + TOKEN_BYTES, Tier.HOST)
        self._file = os.memfd_create("deepstow-weights")
        os.ftruncate(self._file, self._size)
        self._own = self._map(self._file)
        self._memories = [self._own]
        self.weights = self._own.memory[:num_bytes]
        self._processes: list[int] = []
        self._timeout_s = 0.0  # as long as the ranks wait for each other in collectives
        self._lock = threading.Lock()
        self._token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        self._own.memory[-TOKEN_BYTES:].copy_(self._token)

    def _map(self, file: int) -> HostMemory:
        return HostMemory(self._size, self._device, OWNER, file)

    def connect(self, hosts: dist.ProcessGroup) -> None:
        """Map the others' parts, or raise on all ranks. A collective: all have written theirs when it begins."""
        self._timeout_s = hosts._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        ranks, rank = dist.get_world_size(hosts), dist.get_rank(hosts)
        mine = (os.getpid(), self._file, self._size, self._token.tolist())
        parts: list[tuple[int, int, int, list[int]]] = [mine] * ranks
        dist.all_gather_object(parts, mine, group=hosts)
        complaint = ""
        try:
            self._memories = [self._own if at == rank else self._open(*part) for at, part in enumerate(parts)]
        except OSError as error:
            complaint = f"rank {rank} cannot read the memory of another one ({error.strerror})"
        complaints = [""] * ranks
        dist.all_gather_object(complaints, complaint, group=hosts)
        os.close(self._file)  # after all have opened it; the mapping stays
        if first_complaint := next(filter(None, complaints), None):
            where = "they are on several machines, or in containers that do not see each other's processes"
            raise RuntimeError(f"strategies.offload.gather: {first_complaint}: {where}: {CURE}")
        self._processes = [process for process, *_ in parts]

    def _open(self, process: int, file: int, size: int, token: list[int]) -> HostMemory:
        """The part of another rank; on another machine the number may be of some other process, or of none."""
        path = Path(f"/proc/{process}/fd/{file}")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            part = self._map(opened) if os.fstat(opened).st_size == size else None
        finally:
            os.close(opened)
        if part is None or part.memory[-TOKEN_BYTES:].tolist() != token:
            raise FileNotFoundError(2, "another file", str(path))
        return part

    def spans(self, spot: Spot, dtype: torch.dtype, count: int) -> list[Tensor]:
        """What all ranks have at ``spot``, in their order: ``count`` elements of each."""
        return [memory.memory[spot.offset : spot.end].view(dtype)[:count] for memory in self._memories]

    def count(self, bucket: int, replaced: int) -> None:
        """This rank's span of a bucket has been ``replaced`` so many times; it holds its newest weights now. The thread
        that waits for copies down may come here later than the caller who has loaded weights since.
        """
        counts = self._counts(self._own)
        with self._lock:
            counts[bucket] = max(replaced, int(counts[bucket]))

    def wait(self, bucket: int, replaced: int) -> None:
        """Wait until every other rank has ``replaced`` its span of a bucket as often; events tell of this rank's."""
        until_s, look_s = time.monotonic() + self._timeout_s, 0.0
        for rank, memory in enumerate(self._memories):
            if memory is self._own:
                continue
            counts = self._counts(memory)
            while int(counts[bucket]) < replaced:
                time.sleep(POLL_S)
                if (now_s := time.monotonic()) > look_s:
                    look_s = now_s + LOOK_S
                    if started_at(self._processes[rank]) is None:
                        raise dist.DistError(f"rank {rank} has ended, and this one waits for its weights")
                    if now_s > until_s:
                        raise dist.DistError(
                            f"Timed out waiting {self._timeout_s:.0f} s for the weights of rank {rank}"
                        )

    def _counts(self, memory: HostMemory) -> Tensor:
        return memory.memory[self.weights.numel() : -TOKEN_BYTES].view(torch.int64)

    def pin(self, starts: Iterable[int]) -> None:
        distinct = set(starts)
        for memory in self._memories:
            memory.pin(distinct)

    def release(self) -> None:
        for memory in self._memories:
            memory.release()
