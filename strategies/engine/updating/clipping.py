"""Clipping: the one factor on a step's gradients, given by the plan, ``clip`` or the loop; and skipped steps.

The update multiplies every gradient with the factor as it reads it. It is torch's: ``max_norm / (norm + 1e-6)``, at
most 1. A loop gives it by ``clip``, or by multiplying each ``param.grad``, as ``torch.nn.utils.clip_grad_norm_`` does.
A GradScaler (fp16) multiplies all by the inverse of the loss's scale first. That is a power of two, so it is one factor
with clipping's: to multiply by it rounds nothing, be it gradients, norms or the other factor. ``step`` looks whether it
is one: a GradScaler has waited for the device by then.

If updates begin in backward, the norm is not known yet. Then nothing is clipped, and a gradient that is not finite
skips the update of its bucket and of all later ones in this step; if the loss itself is not finite that is all of them.

A skipped step changes nothing. It is known some steps late, since the device is not waited for. After ``PATIENCE`` in a
row no later one will differ, since the weights do not change: ``step`` then raises. Ranks that train together have to
raise it in the same step: they wait for the result, which costs little after they have waited for each other's norms.

Anything else that a loop does to gradients is done in the places where they wait, in the loop's order: further and
different factors, other writes, clipping what was multiplied. A loop that has multiplied gradients has clipped as it
wanted: ``step`` does not clip then.

Refused: clipping or writing where updates begin in backward, scales of the loss that are no powers of two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepstow.strategies.core.layout import Layout
from deepstow.strategies.engine.buckets.bucket_state import BucketState, Scale
from deepstow.strategies.engine.tensors.torch_functions import writes_to
from deepstow.strategies.engine.transfer.transfer import Event, Transfer
from deepstow.strategies.engine.updating.gradients import Gradients
from deepstow.strategies.engine.updating.norms import norms_of

logger = logging.getLogger(__name__)
PATIENCE = 3  # skipped steps in a row
IN_BACKWARD = "the plan updates in backward, before the norm is known: plan with max_grad_norm > 0"


class Clipping:
    """The factor on one step's gradients, and whether the step is skipped."""

    def __init__(self, layout: Layout, gradients: Gradients, transfer: Transfer, device: torch.device) -> None:
        self.scale: Scale | None = None  # None until it is known
        self._layout = layout
        self._gradients = gradients
        self._transfer = transfer
        self._device = device
        self._factors: dict[tuple[int, int], Tensor | float] = {}  # by the loop; keys: bucket, index in it
        self._numbers: dict[
            int, tuple[Tensor, int, Tensor]
        ] = {}  # by id: a factor, its count of writes, its value then
        self._multiplied = False  # by the loop, in their places
        self._unscale: Tensor | None = None  # the inverse of the loss's scale, once a GradScaler has multiplied by it
        self._inverse: tuple[Tensor, Event] | None = None  # the same on the host, once the event has passed

    def clear(self) -> None:
        """The step is made, or its gradients are discarded."""
        self.scale = self._unscale = self._inverse = None
        self._factors.clear()
        self._numbers.clear()
        self._multiplied = False

    def clip(self, max_norm: float) -> Tensor:
        """Clip to ``max_norm`` (0 and infinity: not at all) and return the norm of all gradients."""
        if self._layout.in_backward and max_norm != math.inf:
            raise RuntimeError(IN_BACKWARD)
        if self.scale is not None or self._factors:
            self._carry_out()
        norm = self._of_loss(self._gradients.norm(self._device))
        if not self._layout.in_backward:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if 0 < max_norm < math.inf else None
            self.scale = self._make(factor, norm)
        return norm

    def unscale(self, inverse: Tensor) -> Tensor:
        """Multiply all gradients by the ``inverse`` of the loss's scale. Returns 1.0 if one is not finite."""
        if self._layout.in_backward:
            raise RuntimeError(
                f"a GradScaler needs all gradients first, and {IN_BACKWARD}, or update_in_backward=False"
            )
        if self.scale is not None:  # a clipping of gradients that were still scaled
            self._carry_out()
        norm = self._gradients.norm(self._device)
        self._unscale = inverse.to(self._device, torch.float32).reshape(())
        self._inverse = self._transfer.to_host(self._unscale)
        return torch.logical_not(norm.isfinite()).float()

    def _refuse_odd_scale(self) -> None:
        if self._inverse is None:
            return
        inverse, event = self._inverse
        if not self._transfer.done(event):
            self._transfer.host_wait(event)
        if math.frexp(float(inverse))[0] != 0.5:
            raise RuntimeError(f"a loss scale of 1 / {float(inverse)}: a stowed model's is a power of two")

    @property
    def of_scaled_loss(self) -> bool:
        """Whether a GradScaler looks for the loss's scale, so that some steps are skipped."""
        return self._unscale is not None

    def _of_loss(self, norm: Tensor) -> Tensor:
        """A norm of gradients of the scaled loss, of those of the loss itself."""
        return norm if self._unscale is None else norm * self._unscale

    def in_backward(self, bucket: BucketState) -> Scale:
        """The scale of one bucket whose update begins before all gradients are there."""
        norms = self._gradients.norms_in(bucket, self._device)
        self.scale = self._make(None, torch.stack(norms), self.scale)
        return self.scale

    def of_step(self, buckets: Sequence[BucketState]) -> Scale:
        """The scale of a step; ``buckets`` are those with gradients."""
        self._refuse_odd_scale()
        if self.scale is None and (self._factors or self._multiplied):
            self._scale_of_loop()
        elif self.scale is None:
            self.clip(self._layout.max_grad_norm)
        assert self.scale is not None
        return self.scale

    def _make(self, factor: Tensor | None, norms: Tensor, before: Scale | None = None) -> Scale:
        bad = torch.logical_not(norms.isfinite().all()).float()
        if before is not None:
            bad = torch.maximum(bad, before.bad)
        if self._unscale is not None:
            factor = self._of_loss(torch.ones_like(bad) if factor is None else factor)
        return Scale(
            factor, bad, *self._transfer.to_host(torch.stack([torch.ones_like(bad) if factor is None else factor, bad]))
        )

    # --- param.grad, to be read and multiplied -----------------------------------------------------------------------

    def norm_of(self, bucket: BucketState, index: int) -> Tensor:
        """The norm of one gradient. All norms are computed at once, so that the next ones cost nothing."""
        bucket.grads.refuse_spent(index)
        is_whole = self._gradients.last_pass or self._layout.in_backward
        if is_whole and not self._is_scaled(bucket, index):
            self._gradients.norm(self._device)
            return self._of_loss(bucket.grads.norms[index])
        return norms_of([self.value_of(bucket, index)])[0]

    def value_of(self, bucket: BucketState, index: int) -> Tensor:
        if self._layout.in_backward:
            raise RuntimeError(IN_BACKWARD)
        bucket.grads.refuse_spent(index)
        value, factor = self._gradients.value(bucket, index, self._device), self._factor_of(bucket, index)
        return value if factor is None else value.mul_(factor)

    def _factor_of(self, bucket: BucketState, index: int) -> Tensor | float | None:
        if self.scale is not None:
            return self.scale.factor
        factor = self._factors.get((bucket.index, index))
        return factor if self._unscale is None else self._unscale * (1.0 if factor is None else factor)

    def multiply(self, bucket: BucketState, index: int, factor: Tensor | float) -> None:
        bucket.grads.refuse_spent(index)
        if self._layout.in_backward:
            if bool(factor != 1):
                raise RuntimeError(IN_BACKWARD)
            return
        if self._is_scaled(bucket, index):
            self.write(bucket, index, self.value_of(bucket, index).mul_(factor), multiplied=True)
            return
        self._gradients.finish()  # nothing may be added to a gradient that was multiplied
        self._factors[bucket.index, index] = self._now(factor) if isinstance(factor, Tensor) else factor
        self.scale = None

    def _now(self, factor: Tensor) -> Tensor:
        """The value of a loop's own tensor, which may be written to before the step; the same tensor until it is."""
        cached, count = self._numbers.get(id(factor)), writes_to(factor)
        if cached is None or cached[1] != count:
            cached = self._numbers[id(factor)] = factor, count, factor.detach().clone()
        return cached[2]

    def _is_scaled(self, bucket: BucketState, index: int) -> bool:
        """Whether the update will multiply this gradient by more than the inverse of the loss's scale."""
        clipped = self.scale is not None and self.scale.factor is not None
        return clipped or (bucket.index, index) in self._factors

    def write(self, bucket: BucketState, index: int, value: Tensor, *, multiplied: bool) -> None:
        """``value``, which ``value_of`` gave and a loop has changed, is the gradient from now on. ``multiplied``: that
        is all that was done, so that the loop has clipped as it wanted.
        """
        if self._layout.in_backward:
            raise RuntimeError(IN_BACKWARD)
        bucket.grads.refuse_spent(index)
        self._gradients.finish()
        if self.scale is not None:
            self._carry_out(but=(bucket.index, index))
        self._put(bucket, index, value)
        self._multiplied |= multiplied

    def _put(self, bucket: BucketState, index: int, value: Tensor) -> None:
        self._gradients.write(bucket, index, value if self._unscale is None else value / self._unscale)
        self._factors.pop((bucket.index, index), None)

    def _carry_out(self, but: tuple[int, int] | None = None) -> None:
        """Multiply gradients in their places, before more is done to them, so that each product is rounded as in plain
        training. The inverse of the loss's scale may wait, since it rounds nothing.
        """
        for bucket, index in self._gradients.waiting():
            if (bucket.index, index) != but and self._is_scaled(bucket, index):
                self._put(bucket, index, self.value_of(bucket, index))
        self.scale = None
        self._multiplied = True

    def forget(self, bucket: BucketState, index: int) -> None:
        self._gradients.finish()
        bucket.grads.forget(index)
        self._factors.pop((bucket.index, index), None)

    def _scale_of_loop(self) -> None:
        factors = [self._factors.get((bucket.index, index)) for bucket, index in self._gradients.waiting()]
        if not all(_same(factor, factors[0]) for factor in factors):
            self._carry_out()
            factors = [None]
        factor = None if factors[0] is None else torch.as_tensor(factors[0]).to(self._device, torch.float32)
        self.scale = self._make(factor, self._gradients.norm(self._device))


class NonFiniteError(RuntimeError):
    """Gradients were not finite in several steps in a row, so that no weight changed. ``steps_ago`` counts the steps
    since the first of them; ``parameter`` had the first such gradient of backward.
    """

    def __init__(self, steps_ago: int, parameter: str | None) -> None:
        self.steps_ago = steps_ago
        self.parameter = parameter
        gradient = f"the gradient of {parameter}" if parameter else "a gradient"
        super().__init__(f"{PATIENCE} steps in a row were skipped: {gradient} is not finite")


class SkippedSteps:
    """Counts skipped steps as their results become known."""

    def __init__(self, transfer: Transfer, *, among_ranks: bool) -> None:
        self.skipped = 0
        self._transfer = transfer
        self._among_ranks = among_ranks
        self._waiting: list[tuple[Scale, Mapping[str, Tensor]]] = []
        self._in_a_row: list[Mapping[str, Tensor]] = []

    def add(self, scale: Scale, norms: Mapping[str, Tensor]) -> None:
        """A step was made with gradients of these ``norms``, by parameter in the order of backward."""
        self._waiting.append((scale, norms))

    def poll(self) -> None:
        """Log which steps were skipped, of those that are known without waiting; of all if ranks train together."""
        while self._waiting and (self._among_ranks or self._transfer.done(self._waiting[0][0].known)):
            scale, norms = self._waiting.pop(0)
            if self._among_ranks:
                self._transfer.host_wait(scale.known)
            if not scale.skips:
                self._in_a_row.clear()
                continue
            self.skipped += 1
            self._in_a_row.append(norms)
            logger.warning("a gradient was not finite: this step was skipped (%d so far)", self.skipped)

    def refuse(self) -> None:
        """Raise NonFiniteError if the last ``PATIENCE`` steps that are known were skipped."""
        self.poll()
        if len(self._in_a_row) >= PATIENCE:
            bad = (name for name, norm in self._in_a_row[0].items() if not bool(norm.isfinite()))
            raise NonFiniteError(len(self._in_a_row) + len(self._waiting), next(bad, None))


def _same(factor: Tensor | float | None, other: Tensor | float | None) -> bool:
    """Whether two factors are known to be the same number, without waiting for the device."""
    return factor is other or (isinstance(factor, float) and factor == other)
