"""What gradients are multiplied with before the update, and whether there is one: by us, or by somebody else's loop.

The update multiplies every gradient with one factor as it reads it, so clipping costs no pass of its own. The factor is
torch's: ``max_norm / (norm + 1e-6)``, at most 1. It comes from ``clip``, or from the loop, which has taken norms of
``param.grad`` and multiplied it (``parameters.py``), as ``torch.nn.utils.clip_grad_norm_`` does; that is written down
and done when the update reads the gradient. If neither has happened, the plan's norm holds.

In backward, updates begin before the norm is known. Then nothing is clipped, and a gradient that is not finite stops
the update of its bucket and of all that come after it in this step; where the loss itself is not finite that is all of
them.

Refused: different factors within one step, clipping twice, clipping where updates begin in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.core.layout import Layout
from strategies.engine.bucket_state import BucketState, Scale
from strategies.engine.gradients import Gradients, norms_of
from strategies.engine.transfer.transfer import Lane, Transfer

IN_BACKWARD = "the plan updates in backward, before the norm is known: plan with max_grad_norm > 0"


class Clipping:
    """The scale of one step's gradients."""

    def __init__(self, layout: Layout, gradients: Gradients, transfer: Transfer, device: torch.device) -> None:
        self.scale: Scale | None = None  # as far as it is known
        self._layout, self._gradients, self._transfer, self._device = layout, gradients, transfer, device
        self._factors: dict[
            tuple[int, int], Tensor | float
        ] = {}  # what others multiply with, by bucket and place there

    def clear(self) -> None:
        """The step is made, or its gradients are not wanted."""
        self.scale = None
        self._factors.clear()

    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients, which will be clipped to ``max_norm``; 0 and infinity clip nothing.

        Raises:
            RuntimeError: updates have begun.
        """
        if self._layout.in_backward and max_norm != math.inf:
            raise RuntimeError(IN_BACKWARD)
        norm = self._gradients.norm(self._device)
        if not self._layout.in_backward:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if 0 < max_norm < math.inf else None
            self.scale = self._make(factor, norm)
        return norm

    def in_backward(self, bucket: BucketState) -> Scale:
        """Of one bucket whose update begins before all gradients are there."""
        norms = self._gradients.norms_in(bucket, self._device)
        self.scale = self._make(None, torch.stack(norms), self.scale)
        return self.scale

    def of_step(self, several: Sequence[BucketState]) -> Scale:
        """Of all gradients; ``several`` are the buckets that have some."""
        if self._factors:
            self._adopt(several)
        elif self.scale is None:
            self.clip(self._layout.max_grad_norm)
        assert self.scale is not None
        return self.scale

    def _make(self, factor: Tensor | None, norms: Tensor, before: Scale | None = None) -> Scale:
        bad = torch.logical_not(norms.isfinite().all()).float()
        if before is not None and before.bad is not None:
            bad = torch.maximum(bad, before.bad)
        on_host = torch.empty(2, pin_memory=self._device.type != "cpu")
        on_host.copy_(torch.stack([torch.ones_like(bad) if factor is None else factor, bad]), non_blocking=True)
        return Scale(factor, bad, on_host, self._transfer.record(Lane.COMPUTE))

    # --- gradients in the hands of others ----------------------------------------------------------------------------

    def norm_of(self, bucket: BucketState, index: int) -> Tensor:
        """The norm of one gradient; that of all is taken, so that the next one costs nothing."""
        bucket.grads.refuse_spent(index)
        whole = self._gradients.last_pass or self._layout.in_backward
        if whole and self._factor_of(bucket, index) is None:
            self._gradients.norm(self._device)
            return bucket.grads.norms[index]
        return norms_of([self.value_of(bucket, index)])[0]

    def value_of(self, bucket: BucketState, index: int) -> Tensor:
        """A copy of one gradient, on the device.

        Raises:
            RuntimeError: the update has taken it.
        """
        if self._layout.in_backward:
            raise RuntimeError(IN_BACKWARD)
        bucket.grads.refuse_spent(index)
        value, factor = self._gradients.value(bucket, index, self._device), self._factor_of(bucket, index)
        return value if factor is None else value.mul_(factor)

    def _factor_of(self, bucket: BucketState, index: int) -> Tensor | float | None:
        """What this gradient has been multiplied with so far."""
        return self._factors.get((bucket.index, index)) if self.scale is None else self.scale.factor

    def multiply(self, bucket: BucketState, index: int, factor: Tensor | float) -> None:
        """Somebody multiplies this gradient with ``factor``.

        Raises:
            RuntimeError: the update has taken it, or it is clipped already.
        """
        bucket.grads.refuse_spent(index)
        if self._layout.in_backward:
            if bool(factor != 1):
                raise RuntimeError(IN_BACKWARD)
            return
        if self.scale is not None or (bucket.index, index) in self._factors:
            raise RuntimeError("these gradients were clipped already: clip once per step")
        self._gradients.finish()  # what is multiplied now may not be added to
        self._factors[bucket.index, index] = factor

    def forget(self, bucket: BucketState, index: int) -> None:
        """This gradient is not wanted."""
        self._gradients.forget(bucket, index)
        self._factors.pop((bucket.index, index), None)

    def _adopt(self, several: Sequence[BucketState]) -> None:
        wanted = {
            (bucket.index, index): bucket.spec.params[index] for bucket in several for index in bucket.grads.touched
        }
        missing = [name for place, name in wanted.items() if place not in self._factors]
        first = next(iter(self._factors.values()))
        if missing or any(not _same(factor, first) for factor in self._factors.values()):
            odd = f", that of {missing[0]} with none" if missing else ""
            raise RuntimeError(
                f"gradients were multiplied with different factors{odd}: all of a step are clipped together"
            )
        factor = torch.as_tensor(first).to(self._device, torch.float32)
        self.scale = self._make(factor, self._gradients.norm(self._device))


def _same(factor: Tensor | float, other: Tensor | float) -> bool:
    """Whether two factors are the same number, as far as one sees without waiting for the device."""
    return factor is other or (isinstance(factor, float) and factor == other)
