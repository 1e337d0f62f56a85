"""Slots on the device through which the gradients of several buckets pass.

Backward writes them (COMPUTE), and so does an update on the device whose gradient has waited on the host (UP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deepstow.strategies.engine.buckets.bucket_state import BucketState, Pending
from deepstow.strategies.engine.slots import Ring
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer


class GradientSlots:
    """Gives them to buckets. ``settle`` finishes an update that has begun."""

    def __init__(self, transfer: Transfer, settle: Callable[[BucketState], None]) -> None:
        self._transfer = transfer
        self._settle = settle
        self._ring = Ring(self._left)

    def last(self, bucket: BucketState) -> BucketState | None:
        """Whose gradients the slot of ``bucket`` had last."""
        assert bucket.grad is not None
        return self._ring.last(bucket.grad)

    def enter(self, bucket: BucketState, stream: Stream) -> None:
        """Let ``stream`` write the slot of ``bucket``, which may have it still."""
        assert bucket.grad is not None
        if self.last(bucket) is not bucket:
            self._transfer.wait(stream, *self._ring.take(bucket.grad, bucket))
        self._transfer.wait(stream, bucket.grads.sent)

    def _left(self, former: BucketState) -> Iterable[Event | None]:
        if former.pending is Pending.VISITING:
            self._settle(former)
        return former.grads.sent, former.used
