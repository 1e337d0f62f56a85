"""Collectives of the simulated device, as asynchronous as NCCL's: ``dist.new_group(backend="sim_gloo")``.

A collective is issued to a stream of the group and waits there for what the caller's stream has been given so far; who
waits for its result makes the current stream wait, and never the caller. All of a group run in the order in which they
were issued; what is sent to one rank, and what comes from one, have streams of their own. What is exchanged, gloo
exchanges: the thread of the stream calls it on the second mapping of the memory.

Refused, as by NCCL: tensors on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "sim_gloo"
# Some of these are called differently by other versions of torch.
CALLS = (
    "allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall", "send", "recv",
    "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single", "alltoall_base",
    "all_to_all_single",
)  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _seen_by(view: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return view(value)
    return type(value)(_seen_by(view, each) for each in value) if isinstance(value, list | tuple) else value


class Issued(dist.Work):
    """A collective that was issued; keeps its tensors as long as it is kept itself."""

    def __init__(self, stream: torch.Stream, kept: Any) -> None:
        super().__init__()
        self._event, self._kept = torch.Event(device=stream.device), kept
        self._event.record(stream)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Collectives(dist.ProcessGroup):
    """A group whose tensors are on the simulated device."""

    def __init__(self, library: Any, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._library, self._gloo, self._size = library, gloo, size
        self._streams = defaultdict[Any, torch.Stream](lambda: torch.Stream(device="sim"))

    def size(self) -> int:
        return self._size

    @property
    def _device_types(self) -> list[torch.device]:  # what torch sends objects by
        return [torch.device("sim")]

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    group_name = pg_name

    def barrier(self, opts: Any = None) -> Any:
        torch.accelerator.synchronize()
        return self._gloo.barrier()  # the options name this device

    def issue(self, name: str, given: tuple[Any, ...]) -> Any:
        call = getattr(self._gloo, name)
        if any(tensor.device.type == "cpu" for tensor in _tensors(given)):
            raise RuntimeError(f"No backend type associated with device type cpu ({name})")
        former = torch.accelerator.current_stream()
        theirs = _seen_by(lambda tensor: self._library.for_stream(tensor.view(-1)), given)  # NCCL counts elements
        stream = self._streams[(name, given[1]) if name in ("send", "recv") else "all"]
        stream.wait_stream(former)
        torch.accelerator.set_stream(stream)
        try:
            self._library.queue(lambda: call(*theirs).wait())
            return Issued(stream, given)
        finally:
            torch.accelerator.set_stream(former)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *given: self.issue(name, given)


for _name in CALLS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(Collectives, _name, _method(_name))


def register(library: Any) -> None:
    """Make torch know them."""

    def made(store: Any, rank: int, size: int, timeout: timedelta) -> Collectives:
        gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return Collectives(library, gloo, rank, size)

    dist.Backend.register_backend(NAME, made, devices=["sim"])
