"""Which bucket is in its home, and the copies that bring it there.

To evict a bucket is to make its parameters absent, since an update writes the host's copy back at once. It stays until
another one needs its address: the last blocks of forward are still present when backward begins with them.

[Note: moving in] UP, which alone moves buckets in, waits for all earlier work on the home: its use by COMPUTE
(``used``), the write-back that reads it (``stored``) and what NET brought (``arrived``), by this bucket and all that
overlap it, not only the last one, since homes may overlap in part. Waits already made are free (``transfer.py``), and
copies up that were never used need no wait, for UP made them itself.

[Note: weights under gradients] Where a gradient waits in the place of the host's copy (``parks_in_copy``), an absent
weight can still be wanted before the update: by a forward between backward and step, or by a node of backward that runs
after the weight's gradient was made. Then the host rounds the master, which nobody writes until that update, and UP
copies what comes out; slow, but seldom. If the gradient has been dropped (``zero_grad`` without a step), the host
rounds the master into the place itself, which then is the copy again.

[Note: from the disk] A weight that rests on the disk is read into a slot, ahead of its use as far as that was foreseen
(``expect``), or now (``memory/disk_weights.py``); UP copies it from there. Its update counts as done when it is there
again (``rewritten``).

[Note: encoded] UP copies the codes of a weight into the one place for them on the device, and makes the weight of them
in its home: kernels in the order of its copies, so that the next codes come when these have been read.

Refused: two buckets in use at the same time whose homes overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from deepstow.strategies.core.layout import Item
from deepstow.strategies.engine.buckets.bucket_state import BucketState, Pending
from deepstow.strategies.engine.codecs import EncodedWeights
from deepstow.strategies.engine.memory.disk_weights import DiskWeights, Updated
from deepstow.strategies.engine.ranks.replicas import OneRank
from deepstow.strategies.engine.transfer.transfer import Stream, Transfer


class Residency:
    """Moves buckets in and out of their homes. ``debug``: fill a home with NaN first, and check what it holds."""

    def __init__(
        self, ranks: OneRank, transfer: Transfer, disk: DiskWeights | None, codes: Tensor | None, *, debug: bool
    ) -> None:
        self._ranks = ranks
        self._transfer = transfer
        self._disk = disk
        self._debug = debug
        self._codes = codes  # the memory on the device for those in flight

    def claim(self, bucket: BucketState) -> None:
        """Give ``bucket`` its home; UP may write it afterwards. See [Note: moving in]."""
        for overlapping in bucket.overlapping:
            if overlapping.present and overlapping.open:
                raise RuntimeError(
                    f"{bucket.name} needs the address of {overlapping.name}, which is in use: write a higher "
                    f"strategies.offload.prefetch with weights: streamed (recomputing several blocks at once needs an "
                    f"address for each of them)"
                )
            if overlapping.present:
                assert overlapping.pending is not Pending.VISITING, f"{overlapping.name} is being updated"
                self._vacate(overlapping)
        for former in (bucket, *bucket.overlapping):
            self._transfer.wait(Stream.UP, former.used, former.stored, former.arrived)
        bucket.claim()

    def fetch(self, bucket: BucketState) -> None:
        assert bucket.settled, f"{bucket.name} has an update to wait for"
        self.claim(bucket)
        if bucket.codes is not None:
            self._bring_codes(bucket, bucket.codes)
            return
        self.restore(bucket)
        if bucket.copy_is_on_disk:
            self._bring_from_disk(bucket)
        elif bucket.given_up:
            self._bring_rounded(bucket)
        else:
            self._bring(bucket, bucket.memory[Item.COPY])

    def _bring_codes(self, bucket: BucketState, codes: EncodedWeights) -> None:
        """See [Note: encoded]."""
        assert self._codes is not None
        if self._debug:
            self._transfer.poison(Stream.UP, bucket.weight)
        on_device = EncodedWeights(bucket.spec.frozen_as, self._codes, bucket.spec.num_elements)
        self._transfer.copy(Stream.UP, on_device.memory, codes.memory)
        work = partial(on_device.decode, bucket.weight)
        self._transfer.run(Stream.UP, work, reads=[on_device.memory], writes=[bucket.weight])
        self._ranks.brought(bucket)

    def _bring_from_disk(self, bucket: BucketState) -> None:
        """See [Note: from the disk]."""
        assert self._disk is not None
        self._disk.bring_in(bucket.index)
        self._transfer.wait(Stream.UP, self._transfer.record(Stream.HOST))
        self._bring(bucket, bucket.memory[Item.COPY])
        self._disk.leaves(bucket.index, bucket.arrived)

    def expect(self, buckets: Iterable[BucketState]) -> None:
        """These will be fetched, in this order: what of them rests on the disk is read ahead."""
        if self._disk is not None:
            self._disk.expect(bucket.index for bucket in buckets if not bucket.present)

    def rewritten(self, bucket: BucketState, update: Future[Updated]) -> Future[Updated]:
        """``update`` by the worker, and what makes its weight rest where it belongs."""
        return update if self._disk is None else self._disk.rewrite(bucket.index, update)

    def receive(self, bucket: BucketState, source: Tensor) -> None:
        """Copy updated weights from ``source`` on the host into the home of a resident bucket."""
        self._transfer.wait(Stream.UP, bucket.used)
        self._bring(bucket, source)

    def _bring(self, bucket: BucketState, source: Tensor) -> None:
        if self._debug:
            self._transfer.poison(Stream.UP, bucket.weight)
        self._ranks.bring(bucket, source)

    @torch.no_grad()
    def restore(self, bucket: BucketState) -> None:
        """Make the host's copy current if it was given up to a gradient that nobody waits for any more.

        The host writes after DOWN has written the gradient (``sent``), which came after all else that concerns the
        place: DOWN has written the last weight and its master before, and UP has read that weight. UP reads what the
        host has written, and the next gradient overwrites it.
        """
        if not bucket.given_up or not bucket.settled or bucket.grads.touched:
            return
        transfer = self._transfer
        transfer.host_wait(bucket.grads.sent)
        copy = bucket.memory[Item.COPY]
        transfer.uses(Stream.HOST, reads=[bucket.master], writes=[copy])
        bucket.round_masters(copy)
        written = transfer.record(Stream.HOST)
        transfer.wait(Stream.UP, written)
        transfer.wait(Stream.DOWN, written)  # the weight may be on the device already, and nothing be fetched before it
        bucket.restored()
        self._ranks.written(bucket)

    @torch.no_grad()
    def _bring_rounded(self, bucket: BucketState) -> None:
        """Copy rounded masters up; see [Note: weights under gradients]. DOWN has written them (``stored``)."""
        transfer = self._transfer
        transfer.host_wait(bucket.stored)
        transfer.uses(Stream.HOST, reads=[bucket.master])
        if self._debug:
            transfer.poison(Stream.UP, bucket.weight)
        transfer.wait(Stream.UP, transfer.record(Stream.HOST))  # the host rounds before it issues each copy
        span = bucket.own(bucket.weight)
        for piece in bucket.pieces:
            transfer.copy(Stream.UP, span[piece.at : piece.at + piece.size], bucket.rounded(piece))
        self._ranks.brought(bucket)

    def use(self, bucket: BucketState) -> None:
        """COMPUTE is about to use the home: it waits for the weights, and the parameters show them."""
        self._transfer.wait(Stream.COMPUTE, bucket.arrived)
        bucket.views.show()
        if self._debug:
            others = [other.name for other in bucket.overlapping if other.present]
            assert bucket.present and not others, f"{bucket.name} is used, but its home holds {others}"
            self._transfer.uses(Stream.COMPUTE, reads=[bucket.weight])

    def left(self, buckets: Iterable[BucketState]) -> None:
        """COMPUTE has been given everything that uses these homes for now."""
        event = None
        for bucket in buckets:
            event = event or self._transfer.record(Stream.COMPUTE)
            bucket.used = event
            if not bucket.open and not bucket.spec.resident:
                bucket.views.make_absent()
                if self._transfer.eager and bucket.present and bucket.settled:
                    self._vacate(bucket)

    def _vacate(self, bucket: BucketState) -> None:
        bucket.vacate()
        self._transfer.vacated(bucket.weight, bucket.used, bucket.stored, bucket.arrived)
