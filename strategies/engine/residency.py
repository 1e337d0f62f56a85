"""Presence: which bucket is in its home, and the copies that bring it there.

Eviction is free: the host's copy of a bucket that travels is current at all times (an update writes it back at once),
so leaving is nothing but hiding the parameters. Leaving is also lazy: a bucket stays until somebody wants its address.
Therefore the last blocks of forward are still present when backward begins with them, and are not fetched again.

[Note: moving in] UP, which alone moves in, waits for everything that has to do with its former tenants: their use
by COMPUTE (``used``) and the write-back that reads it (``stored``); a copy up that nobody used is UP's own. All rivals
are asked, not only the last tenant, since homes may overlap in part; waits already made cost nothing (``transfer.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from strategies.engine.bucket_state import BucketState, Pending, Presence
from strategies.engine.transfer.transfer import Lane, Transfer


class Residency:
    """Moves buckets in and out of their homes.

    Args:
        debug: homes are filled with NaN before a bucket moves in, and every use checks who lives there.
    """

    def __init__(self, transfer: Transfer, *, debug: bool) -> None:
        self.transfer, self.debug = transfer, debug
        self._stamps: dict[int, tuple[str, int]] = {}

    def claim(self, bucket: BucketState) -> None:
        """Make ``held`` the tenant of its home; UP may write it afterwards. See [Note: moving in].

        Raises:
            RuntimeError: a rival is in use: the model uses together what the plan keeps apart.
        """
        for other in bucket.overlapping:
            if other.present:
                self._evict(other, bucket)
        for former in (bucket, *bucket.overlapping):
            self.transfer.wait(Lane.UP, former.used, former.stored)
        bucket.presence = Presence.PRESENT
        bucket.generation += 1
        if self.debug:
            self._stamp(bucket)

    def _evict(self, bucket: BucketState, wanted_by: BucketState) -> None:
        """Hide the parameters; their bytes are on the host already."""
        if bucket.open:
            raise RuntimeError(
                f"{wanted_by.name} needs the address of {bucket.name}, which is in use: write a higher "
                f"strategies.offload.prefetch with weights: streamed (recomputing several blocks at once needs an "
                f"address for each of them)"
            )
        assert bucket.pending is not Pending.VISITING, f"{bucket.name} is being updated"
        self._vacate(bucket)

    def fetch(self, bucket: BucketState) -> None:
        """Copy the weights up from the host into their home."""
        assert bucket.copy is not None and bucket.settled, f"{bucket.name} has nothing to fetch"
        self.claim(bucket)
        self._bring(bucket, bucket.copy)

    def receive(self, bucket: BucketState, source: Tensor) -> None:
        """Copy updated weights from ``source`` on the host into the home of a resident bucket."""
        self.transfer.wait(Lane.UP, bucket.used)
        self._bring(bucket, source)

    def _bring(self, bucket: BucketState, source: Tensor) -> None:
        if self.debug:
            self.transfer.poison(Lane.UP, bucket.weight)
        self.transfer.copy(Lane.UP, bucket.weight, source)
        bucket.arrived = self.transfer.record(Lane.UP)
        bucket.presence = Presence.PRESENT

    def use(self, bucket: BucketState) -> None:
        """COMPUTE is about to use the home, and the parameters show it."""
        self.transfer.wait(Lane.COMPUTE, bucket.arrived)
        bucket.show()
        if self.debug:
            self._check(bucket)
            self.transfer.reads(Lane.COMPUTE, bucket.weight)

    def left(self, several: Iterable[BucketState]) -> None:
        """COMPUTE has been given everything that uses these homes for now."""
        event = None
        for bucket in several:
            event = event or self.transfer.record(Lane.COMPUTE)
            bucket.used = event
            if not bucket.open and not bucket.spec.resident:
                bucket.cover()
                if self.transfer.eager and bucket.present and bucket.settled:
                    self._vacate(bucket)

    def _vacate(self, bucket: BucketState) -> None:
        bucket.leave()
        self.transfer.vacated(bucket.weight, bucket.used, bucket.stored, bucket.arrived)

    def _stamp(self, bucket: BucketState) -> None:
        for other in bucket.overlapping:
            self._stamps.pop(other.index, None)
        self._stamps[bucket.index] = (bucket.name, bucket.generation)

    def _check(self, bucket: BucketState) -> None:
        if bucket.spec.resident:
            return
        stamp = self._stamps.get(bucket.index)
        assert stamp == (bucket.name, bucket.generation), f"{bucket.name} is used, but its home holds {stamp}"
