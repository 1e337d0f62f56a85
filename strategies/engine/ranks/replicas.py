"""What ranks do together in a step: the interface, what one rank alone does, which is nothing, and replicas.

    OneRank    there are no others
    Replicas   each rank has the whole training state; gradients are averaged
    Shares     each has a span of every bucket; spans go over the network, or through the host's memory (``shares.py``)

All methods but ``written`` and ``bring`` are collectives or nothing: every rank calls them in the same order.

Replicas share buffers (running statistics, codebooks, counters) as torch's DistributedDataParallel does under Hugging
Face's Trainer, which evaluates the model itself, each rank with its own buffers: the first rank's are sent before the
first forward with gradients, before the first one after each step, and before any forward that follows a step's last
micro-batch. Forwards without gradients share nothing and do not count.

What a host has to know before it goes on, the hosts tell each other, and not the devices: a device would first do all
that it was given. So they have a group of their own, of gloo's collectives, unless the device is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstow.strategies.core.layout import Item
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.ranks.two_level import TwoLevel
from deepstow.strategies.engine.tensors.parameters import is_placeholder
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer

if TYPE_CHECKING:
    from deepstow.strategies.engine.memory.arena import Arena

Place = tuple[BucketState, int]  # of a parameter: its bucket, and its index there


class Exchange(Protocol):
    """What averages gradients in place of their sum, in fewer bytes (``strategies/plugins/compressed.py``)."""

    def means(self, bucket: int, names: Sequence[str], gradients: Sequence[Tensor]) -> bool:
        """Gradients of a bucket become their means over the ranks, the same bits on all. False: not in this step, and
        nothing was done. A collective.
        """


class OneRank:
    """The methods in the order in which a step calls them. ``many``: gradients are averaged over several ranks.
    ``shared``: each holds a span of every bucket, and exchanges follow from where forward and backward are. ``common``:
    the memory of this rank on the host that the others read. ``exchange``: what averages gradients, if not a sum.
    """

    rank, ranks = 0, 1
    many = shared = False
    scaled = False  # the loss of the backward that begins is divided by the number of ranks
    common: Tensor | None = None
    exchange: Exchange | None = None

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def connect(self, buckets: Sequence[BucketState], arena: Arena) -> None:
        """Before the first step: the buckets have taken in their weights."""

    def begin_forward(self, *, trains: bool, is_last: bool) -> None:
        """Forward begins; ``is_last``: of the last micro-batch of a step."""

    def note(self, what: str, module: str) -> None:
        """Forward or backward has come to a module, on all ranks alike."""

    def bring(self, bucket: BucketState, source: Tensor) -> None:
        """UP copies the newest weights into the home; ``source``: this rank's span of them, on the host."""
        self._transfer.copy(Stream.UP, bucket.own(bucket.weight), source)
        self.brought(bucket)

    def brought(self, bucket: BucketState) -> None:
        """UP has been given the copies of this rank's span; those of the others come, too."""
        bucket.arrived = self._transfer.record(Stream.UP)

    def gather(self, bucket: BucketState) -> None:
        """Bring the other ranks' spans of the home, where its own has the newest weights."""

    def begin_backward(self) -> None:
        """The gradients of another micro-batch are about to come; ``note`` has said which modules backward will run."""

    def due(self, waiting: Iterable[BucketState], landed: BucketState) -> Sequence[BucketState]:
        """Of the buckets whose gradients are not averaged yet, those to average now that one more has ``landed``."""
        return [landed]

    def average(self, bucket: BucketState, prepare: Callable[[BucketState], None]) -> None:
        """The mean over the ranks in the gradient slot, which ``prepare`` gives to the bucket."""

    def step(self) -> None:
        """The optimizer makes a step, after however many micro-batches."""

    def end_backward(self, order: Sequence[Place]) -> None:
        """All is averaged: a parameter that has a gradient on any rank has one on all. ``order``: all that train."""

    def tell_norms(self, gradients: Sequence[Place], device: torch.device) -> None:
        """Give every rank the norms of these gradients, each of which some rank has measured."""

    def stop_reading(self) -> None:
        """Before weights are replaced: return when no rank reads the old ones any more."""

    def written(self, bucket: BucketState, after: Event | None = None) -> None:
        """This rank's span on the host has the newest weights, once ``after`` has passed."""

    @contextmanager
    def scaled_loss(self) -> Iterator[int]:
        """For the backward of a loss that is divided by the number that this gives: where N ranks share the state and N
        is no power of two, their gradients are then added, with the bits of one process that divides so. Otherwise the
        number is 1: they are divided by N afterwards, without rounding.
        """
        self.scaled = self.shared and self.ranks & (self.ranks - 1) > 0
        try:
            yield self.ranks if self.scaled else 1
        finally:
            self.scaled = False

    def of_first(self, value: Tensor) -> Tensor:
        """The first rank's ``value``; it may be in the same memory."""
        return value

    def everywhere(self, flag: bool) -> bool:
        """Whether all ranks that share weights say so."""
        return flag

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return flag

    def close(self) -> None:
        """No step follows."""


class Replicas(OneRank):
    """Broadcasts the first rank's parameters and buffers when it is made, if all have the same model. A collective."""

    many = True

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        transfer: Transfer,
        device: torch.device,
        two_level: TwoLevel | None = None,
    ) -> None:
        super().__init__(transfer)
        self._two_level = two_level
        self._model = model
        self._group = group
        self._hosts = hosts_of(group, device)
        self._due = True  # the next forward with gradients shares buffers
        self.ranks = dist.get_world_size(group)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
        models: list[Any] = [None] * self.ranks
        dist.all_gather_object(models, mine, group=group)
        if any(other != mine for other in models):
            raise ValueError("the ranks have different models: names, shapes and dtypes of parameters must be the same")
        self._share((tensor.detach() for _, tensor in tensors if not is_placeholder(tensor)), device)

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
        for tensor in tensors:
            value = self.of_first(tensor.to(device))
            if value is not tensor:
                tensor.copy_(value)

    def of_first(self, value: Tensor) -> Tensor:
        value = value.contiguous()
        dist.broadcast(value, dist.get_global_rank(self._group, 0), group=self._group)
        return value

    def due(self, waiting: Iterable[BucketState], landed: BucketState) -> Sequence[BucketState]:
        """In one order on all ranks, whatever the order in which their gradients land."""
        return list(takewhile(lambda bucket: bucket.grads.complete, waiting))

    def average(self, bucket: BucketState, prepare: Callable[[BucketState], None]) -> None:
        prepare(bucket)
        for index in range(len(bucket.params)):
            if index not in bucket.grads.touched:
                bucket.part(bucket.memory[Item.GRAD], index).zero_()
        self._add_up(bucket, bucket.memory[Item.GRAD])

    def _exchanged(self, bucket: BucketState) -> bool:
        """Whether there is another exchange, which has made the gradients means."""
        if self.exchange is None:
            return False
        gradients = bucket.gradients(range(len(bucket.params)))
        return self.exchange.means(bucket.index, bucket.spec.params, gradients)

    def _add_up(self, bucket: BucketState, grad: Tensor) -> None:
        """As torch's data parallelism does it: divide, then sum."""
        if self._exchanged(bucket):
            return
        grad.div_(self.ranks)
        if self._two_level is None:
            dist.all_reduce(grad, group=self._group)
        else:
            self._two_level.all_reduce(grad, grad.new_empty(self._two_level.room(grad.numel())))

    def end_backward(self, order: Sequence[Place]) -> None:
        mine = (index in bucket.grads.touched for bucket, index in order)
        for (bucket, index), flag in zip(order, self._on_any(mine), strict=True):
            if flag and index not in bucket.grads.touched:
                bucket.grads.touch(index)

    def any_rank(self, flag: bool) -> bool:
        (is_on_any,) = self._on_any([flag])
        return is_on_any

    def _on_any(self, flags: Iterable[bool]) -> list[bool]:
        """Which of ``flags`` some rank has set. A collective."""
        return [bool(flag) for flag in self._largest(flags)]

    def _largest(self, numbers: Iterable[float]) -> list[float]:
        """Of each number the largest of all ranks. A collective."""
        maxima = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._hosts)
        largest: list[float] = maxima.tolist()
        return largest


def hosts_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives do not wait for ``device``. A collective.

    It is closed with all others. Torch names it after its ranks: if it were closed alone, the next one would have its
    name and find its addresses in the store.
    """
    if device.type == "cpu":
        return group
    ranks = dist.get_process_group_ranks(group)
    hosts: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return hosts
