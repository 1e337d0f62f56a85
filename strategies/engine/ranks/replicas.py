"""Ranks that each have the whole training state: the weights they start with, buffers, and gradients averaged.

Buffers (running statistics, codebooks, counters) are shared as by torch's DistributedDataParallel under Hugging Face's
Trainer, which evaluates the model itself, each rank with its own buffers: the first rank's are sent before the first
forward with gradients, before the first one after each step, and before any forward that follows a step's last
micro-batch. Forwards without gradients share nothing and do not count.

What a host has to know before it goes on, the hosts tell each other, and not the devices: a device would first do all
that it was given. So they have a group of their own, of gloo's collectives, unless the device is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.ranks.one_rank import OneRank, Place
from strategies.engine.transfer.transfer import Transfer


class Replicas(OneRank):
    """Broadcasts the first rank's parameters and buffers when it is made, if all have the same model. A collective."""

    many = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, transfer: Transfer, device: torch.device) -> None:
        super().__init__(transfer)
        self._model, self._group, self._hosts = model, group, hosts_of(group, device)
        self._due = True  # the next forward with gradients shares buffers
        self.ranks = dist.get_world_size(group)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
        models: list[Any] = [None] * self.ranks
        dist.all_gather_object(models, mine, group=group)
        if any(other != mine for other in models):
            raise ValueError("the ranks have different models: names, shapes and dtypes of parameters must be the same")
        self._share((tensor.detach() for _, tensor in tensors), device)

    def begin_forward(self, *, trains: bool, is_last: bool) -> None:
        if trains:
            if self._due:
                self._share(self._model.buffers())
            self._due = is_last

    def step(self) -> None:
        self._due = True

    @torch.no_grad()
    def _share(self, tensors: Iterable[Tensor], device: torch.device | None = None) -> None:
        """Give all ranks the first one's values, by way of ``device``."""
        first = dist.get_global_rank(self._group, 0)
        for tensor in tensors:
            value = tensor.to(device).contiguous()
            dist.broadcast(value, first, group=self._group)
            if value is not tensor:
                tensor.copy_(value)

    def due(self, waiting: Iterable[BucketState], landed: BucketState) -> Sequence[BucketState]:
        """In one order on all ranks, whatever the order in which their gradients land."""
        return list(takewhile(lambda bucket: bucket.grads.complete, waiting))

    def average(self, bucket: BucketState, prepare: Callable[[BucketState], None]) -> None:
        prepare(bucket)
        assert bucket.grad is not None
        for index in range(len(bucket.params)):
            if index not in bucket.grads.touched:
                bucket.part(bucket.grad, index).zero_()
        self._add_up(bucket, bucket.grad)

    def _add_up(self, bucket: BucketState, grad: Tensor) -> None:
        """As torch's data parallelism does it: divide, then sum."""
        grad.div_(self.ranks)
        dist.all_reduce(grad, group=self._group)

    def end_backward(self, order: Sequence[Place]) -> None:
        mine = (index in bucket.grads.touched for bucket, index in order)
        for (bucket, index), flag in zip(order, self._on_any(mine), strict=True):
            if flag and index not in bucket.grads.touched:
                bucket.grads.touch(index)

    def _on_any(self, flags: Iterable[bool]) -> list[bool]:
        """Which of ``flags`` some rank has set. A collective."""
        known = torch.tensor([float(flag) for flag in flags])
        dist.all_reduce(known, dist.ReduceOp.MAX, group=self._hosts)
        return [bool(flag) for flag in known.tolist()]


def hosts_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives do not wait for ``device``. A collective.

    It is closed with all others. Torch names it after its ranks: if it were closed alone, the next one would have its
    name and find its addresses in the store.
    """
    if device.type == "cpu":
        return group
    ranks = dist.get_process_group_ranks(group)
    found: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return found
