"""Gradients that a plain loop would still have, and this one has not.

In plain torch a gradient stays where it is until somebody takes it away: a second backward adds to it, a second
``step`` uses it again, and ``zero_grad(set_to_none=False)`` leaves a zero, with which a weight is decayed although
backward brought it nothing. Here ``step`` takes the gradients, and a zero has no place.

Most loops never notice. Those that would train otherwise are refused: a gradient is *spent* from ``step`` until it is
made None or zero; spent ones cannot be read, added to or stepped with. A *zeroed* one must have got a gradient by the
next step.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.engine.bucket_state import BucketState


class Leftovers:
    """Which gradients of these buckets are spent or zeroed."""

    def __init__(self, several: Sequence[BucketState]) -> None:
        self._all = several

    def refuse_spent(self, bucket: BucketState, index: int) -> None:
        """Do nothing where the gradient of this parameter is not one that ``step`` has taken.

        Raises:
            RuntimeError: it is.
        """
        if index in bucket.spent:
            raise RuntimeError(
                f"step() took the gradient of {bucket.spec.params[index]}: read it before, and call zero_grad() after "
                f"every step()"
            )

    def refuse(self) -> None:
        """Do nothing where each parameter's gradient is what backward has brought since the last step, or None.

        Raises:
            RuntimeError: there are others.
        """
        for bucket in self._all:
            for index in bucket.spent:
                self.refuse_spent(bucket, index)
            for index in bucket.zeroed - bucket.touched:
                raise RuntimeError(
                    f"{bucket.spec.params[index]} has a gradient of zero and got none in backward, which would update "
                    f"it all the same: call zero_grad() without set_to_none=False"
                )

    def zero(self, *, to_none: bool) -> None:
        """All gradients become None, or zero where there were any."""
        for bucket in self._all:
            bucket.zeroed = set() if to_none else bucket.zeroed | bucket.touched | bucket.spent
            bucket.spent.clear()

    def spend(self) -> None:
        """A step takes the gradients."""
        for bucket in self._all:
            bucket.spent |= bucket.touched
            bucket.zeroed.clear()
