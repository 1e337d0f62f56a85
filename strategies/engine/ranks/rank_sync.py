"""What ranks share besides gradients: the weights they start with, buffers, and what their hosts have to agree on.

Torch's DistributedDataParallel broadcasts the first rank's buffers (running statistics, codebooks, counters) before a
forward if gradients were averaged after the last forward; with several micro-batches under ``no_sync`` that is before
the first one only. Hugging Face's Trainer trains like that by default, and evaluates the model itself, each rank with
its own buffers.

The same is done here: buffers are shared before the first forward with gradients, before the first one after each step,
and before any forward that follows a step's last micro-batch. Forwards without gradients share nothing and do not
count; a loop that evaluates through DistributedDataParallel itself would see the first rank's buffers there.

What a host has to know before it goes on, the hosts tell each other, and not the devices: a device would first do all
that it was given. So they have a group of their own, of gloo's collectives, unless the device is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.engine.tensors.parameters import put

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedBuffers:
    """Broadcasts parameters and buffers of ``model`` now, and its buffers before those forwards for which it is due.

    Raises:
        ValueError: the ranks have different models.
    """

    def __init__(self, model: nn.Module, device: torch.device, group: ProcessGroup) -> None:
        self._model, self._group = model, group
        self._due = True
        tensors = [*model.named_parameters(), *model.named_buffers()]
        mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
        models: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(models, mine, group=group)
        if any(other != mine for other in models):
            raise ValueError("the ranks have different models: names, shapes and dtypes of parameters must be the same")
        _share((tensor.detach() for _, tensor in tensors), group, device)

    def forward(self, *, is_last: bool) -> None:
        """A forward with gradients begins; ``is_last``: of the last micro-batch of a step. A collective if due."""
        if self._due:
            _share(self._model.buffers(), self._group)
        self._due = is_last

    def step(self) -> None:
        """The optimizer made a step, after however many micro-batches."""
        self._due = True


@torch.no_grad()
def _share(tensors: Iterable[Tensor], group: ProcessGroup, device: torch.device | None = None) -> None:
    """Give all ranks the first one's values, by way of ``device``. A collective."""
    first = dist.get_global_rank(group, 0)
    for tensor in tensors:
        value = tensor.to(device).contiguous()
        dist.broadcast(value, first, group=group)
        if value is not tensor:
            tensor.copy_(value)


def average(flat: Tensor, group: ProcessGroup) -> None:
    """The mean over the ranks, in place; as torch's data parallelism does it: divide, then sum. A collective."""
    flat.div_(dist.get_world_size(group))
    dist.all_reduce(flat, group=group)


def hosts_of(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """A group of the same ranks whose collectives do not wait for ``device``. A collective.

    It is closed with all others. Torch names it after its ranks: if it were closed alone, the next one would have its
    name and find its addresses in the store.
    """
    if device.type == "cpu":
        return group
    ranks = dist.get_process_group_ranks(group)
    found: ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return found


def timeout_of(hosts: ProcessGroup) -> timedelta:
    """How long ``hosts`` wait for a rank in their collectives."""
    found: timedelta = hosts._get_backend(torch.device("cpu")).options._timeout
    return found


def on_any_rank(flags: Iterable[bool], hosts: ProcessGroup) -> list[bool]:
    """Which of ``flags`` some rank has set. A collective."""
    known = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(known, dist.ReduceOp.MAX, group=hosts)
    return [bool(flag) for flag in known.tolist()]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers of ``model`` to ``device``; each remains the same object."""
    for buffer in model.buffers():
        put(buffer, buffer.detach().to(device))
