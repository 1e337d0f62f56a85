"""Gradients on their way to the host, and what the worker does with them there.

    first micro-batch    DOWN into PARKED
    later ones           DOWN into ARRIVAL, a slot, from where the worker adds them to PARKED
    norms                of a single micro-batch on COMPUTE, before it leaves; of several in PARKED, by the worker

Ordering. COMPUTE wrote the source (an event of COMPUTE). UP has read PARKED, or the weight's copy that the gradient
replaces (``arrived``). An addition to PARKED is done before the next micro-batch overwrites it (``added``). Slots wait
for their last users (``slots.py``): ARRIVAL, and a PARKED that is one (``grad_taken``). The memory of a direct
gradient, which has no slot, goes back to torch's allocator when this returns, and whoever gets it next writes it on
COMPUTE: so COMPUTE waits for ``sent`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from deepstow.strategies.core.layout import Item
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.slots import Ring
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer
from deepstow.strategies.engine.transfer.worker import Worker
from deepstow.strategies.engine.updating.norms import norms_of


class GradientsDown:
    """Sends gradients to where they wait on the host; ``accumulation``: micro-batches per update; ``settle`` finishes
    an update.
    """

    def __init__(
        self, accumulation: int, transfer: Transfer, worker: Worker, settle: Callable[[BucketState], None]
    ) -> None:
        self._accumulation = accumulation
        self._transfer = transfer
        self._worker = worker
        self._settle = settle
        self._parked = Ring(self._left_in_parked)
        self._arrivals = Ring(_left_in_arrival)

    def send(self, bucket: BucketState) -> None:
        """DOWN with what has landed in the slot and was not sent: nothing, all, or some parameters."""
        leaving = sorted(bucket.grads.unsent)
        if not leaving:
            return
        if bucket.spec.grad_passes and self._accumulation == 1:  # the next bucket may take the slot at once
            measurable = [index for index in leaving if bucket.measures(index)]
            bucket.grads.measured(measurable, norms_of(bucket.gradients(measurable)))
        source = bucket.own(bucket.memory[Item.GRAD])
        if bucket.spec.grad_split:
            self._keep(bucket, source)
        elif len(leaving) == len(bucket.params):
            self._copy(bucket, leaving, [(slice(None), source)])
        else:
            places = [slice(piece.at, piece.at + piece.size) for piece in bucket.pieces_in(leaving)]
            self._copy(bucket, leaving, [(place, source[place]) for place in places])

    def _keep(self, bucket: BucketState, source: Tensor) -> None:
        """This rank keeps its span of the sum, so that the slot is free for others: on COMPUTE, as the update is."""
        kept = bucket.memory[Item.PARKED]
        self._transfer.uses(Stream.COMPUTE, reads=[source], writes=[kept])
        kept.copy_(source)
        bucket.grads.send(sent=self._transfer.record(Stream.COMPUTE))

    def send_direct(self, bucket: BucketState, index: int, grad: Tensor) -> None:
        """DOWN with the gradient of one parameter, whose memory is free when this returns."""
        if self._accumulation == 1:
            bucket.grads.measured([index], norms_of([grad]))
        (piece,), source = bucket.pieces_in([index]), grad.reshape(-1)
        self._transfer.uses(Stream.COMPUTE, writes=[source])
        self._copy(bucket, [index], [(slice(piece.at, piece.at + piece.size), source)])
        self._transfer.wait(Stream.COMPUTE, bucket.grads.sent)
        self._transfer.uses(Stream.COMPUTE, writes=[source])  # by whoever gets the memory next

    def _copy(self, bucket: BucketState, leaving: list[int], parts: Sequence[tuple[slice, Tensor]]) -> None:
        """Copies of ``leaving``: ``parts`` are places in PARKED, or in ARRIVAL, with what goes there."""
        grads = bucket.grads
        transfer = self._transfer
        summed = frozenset(bucket.grads.summed)
        adds = not summed.isdisjoint(leaving)
        target = bucket.memory[Item.ARRIVAL if adds else Item.PARKED]
        if adds:
            transfer.wait(Stream.DOWN, *self._arrivals.take(target, bucket))
        elif self._parked.last(target) is not bucket:
            transfer.wait(Stream.DOWN, *self._parked.take(target, bucket))
        if not adds and grads.added is not None:  # done long ago: an update has read PARKED since
            transfer.wait(Stream.DOWN, grads.added.result())
        transfer.wait(Stream.DOWN, transfer.record(Stream.COMPUTE), bucket.arrived)
        if bucket.parks_in_copy:
            bucket.give_up_copy()
        for place, source in parts:
            transfer.copy(Stream.DOWN, target[place], source)
        grads.send(sent=transfer.record(Stream.DOWN))
        if adds:
            work = partial(self._add, bucket, target, leaving, summed, grads.sent)
            grads.added = self._worker.submit(bucket.index, work)

    def _left_in_parked(self, former: BucketState) -> Iterator[Event | None]:
        if former.grads.taken is not None:
            yield former.grads.taken.result()[1]
            if former.spec.mixed and former.spec.resident:
                self._settle(former)
                yield former.arrived
        elif former.grads.summed:  # and not submitted
            raise RuntimeError(
                f"a bucket needs the place of the gradients of {former.name}, of which not all have come (a parameter "
                f"has none, or is still in use): set strategies.offload.gradients: host"
            )

    def _add(
        self, bucket: BucketState, arrival: Tensor, indices: list[int], summed: frozenset[int], sent: Event | None
    ) -> Event:
        parked = bucket.memory[Item.PARKED]
        self._transfer.host_wait(sent)
        self._transfer.uses(Stream.HOST, reads=[arrival], writes=[parked])
        for change, subset in (
            (torch._foreach_add_, summed.intersection(indices)),
            (torch._foreach_copy_, frozenset(indices) - summed),
        ):
            places = [slice(piece.at, piece.at + piece.size) for piece in bucket.pieces_in(subset)]
            if places:
                change([parked[place] for place in places], [arrival[place] for place in places])
        return self._transfer.record(Stream.HOST)

    def measure(self, bucket: BucketState) -> None:
        """Let the worker compute the norms of gradients that were summed on the host."""
        touched, sent = sorted(bucket.grads.touched), bucket.grads.sent

        def norms() -> list[Tensor]:
            self._transfer.host_wait(sent)
            return norms_of([bucket.shaped(bucket.memory[Item.PARKED], index) for index in touched])

        bucket.grads.host_norms = touched, self._worker.submit(bucket.index, norms)

    def finish_sums(self) -> None:
        """Return when the worker has added what was sent."""
        self._arrivals.finish()


def _left_in_arrival(former: BucketState) -> Iterator[Event]:
    if former.grads.added is not None:
        yield former.grads.added.result()
