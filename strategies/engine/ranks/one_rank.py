"""What ranks do together in a step: the interface, and what one rank alone does, which is nothing.

    OneRank    there are no others
    Replicas   each rank has the whole training state; gradients are averaged (``replicas.py``)
    Shares     each has a span of every bucket; spans go over the network, or through the host's memory (``shares.py``)

All methods but ``written`` and ``bring`` are collectives or nothing: every rank calls them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.transfer.transfer import Event, Lane, Transfer

if TYPE_CHECKING:
    from strategies.engine.memory.arena import Arena

Place = tuple[BucketState, int]  # of a parameter: its bucket, and its index there


class OneRank:
    """The methods in the order in which a step calls them. ``many``: gradients are averaged over several ranks.
    ``shared``: each holds a span of every bucket, and exchanges follow from where forward and backward are. ``common``:
    the memory of this rank on the host that the others read.
    """

    rank = 0
    many = shared = False
    common: Tensor | None = None

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
        self._transfer.copy(Lane.UP, bucket.own(bucket.weight), source)
        self.brought(bucket)

    def brought(self, bucket: BucketState) -> None:
        """UP has been given the copies of this rank's span; those of the others come, too."""
        bucket.arrived = self._transfer.record(Lane.UP)

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

    def everywhere(self, flag: bool) -> bool:
        """Whether all ranks that share weights say so."""
        return flag

    def close(self) -> None:
        """No step follows."""
