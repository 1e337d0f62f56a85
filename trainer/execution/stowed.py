"""The memory engine drives the model: it holds weights, gradients and state, so nothing is wrapped, moved or clipped by
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.engine.optimizer import StowOptimizer
from deepstow.strategies.engine.saving import state_file
from deepstow.trainer.execution.base import Batch, Execution, Place


class Stowed(Execution):
    """Until there is an engine to ``adopt``, as Accelerate has it."""

    def __init__(self, grid: Grid | None = None) -> None:
        super().__init__(grid)
        self._batches: Sequence[Batch] = ()  # the micro-batches of this step, where all pass a layer before the next
        self._losses: list[Tensor] = []  # of those that have run already
        self._divides_by = 1  # the loss, meanwhile

    def adopt(self, optimizer: StowOptimizer) -> None:
        self.stowed = optimizer

    def begin_step(self, batches: Sequence[Batch]) -> None:
        if self.stowed is not None and self.stowed.layers is not None:
            self._batches = list(batches)
            self._losses = []

    def training_step(self, step: Callable[[Batch], Tensor], batch: Batch, num_items: Any) -> Tensor:
        """Where micro-batches take turns in each layer, the first one of a step runs all of them."""
        if self.stowed is None or self.stowed.layers is None:
            return step(batch)
        if not self._losses:
            window = self._batches if any(batch is micro_batch for micro_batch in self._batches) else [batch]
            with self.stowed.scaled_loss() as self._divides_by:
                self._losses = self.stowed.layers.run([partial(step, micro_batch) for micro_batch in window])
        return self._losses.pop(0)

    def backward(self, loss: Tensor, accelerator: Any, backward: Callable[..., None], **options: Any) -> None:
        if self.stowed is None:
            backward(loss, **options)
            return
        layers = self.stowed.layers
        if layers is not None and layers.runs:  # backward of all micro-batches, when they have come so far
            layers.backward(loss / self._divides_by if self._divides_by > 1 else loss)
            return
        with self.stowed.scaled_loss() as ranks:
            backward(loss / ranks if ranks > 1 else loss, **options)

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, accelerator: Any, clip: Any) -> Any:
        """Raise ValueError for another norm than the Euclidean one, or if parameters that have a gradient are left
        out.
        """
        if self.stowed is None:
            return clip(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: a stowed model clips by the Euclidean norm, 2")
        ids = {id(parameter) for parameter in parameters}
        trained = [parameter for group in self.stowed.param_groups for parameter in group["params"]]
        left_out = sum(id(parameter) not in ids and parameter.grad is not None for parameter in trained)
        if left_out:
            raise ValueError(
                f"clip_grad_norm_ leaves out {left_out} of {len(trained)} parameters: all of a stowed model's are "
                f"clipped together; give it model.parameters()"
            )
        return self.stowed.clip_grad_norm_(max_norm)

    def gathered(
        self, model: Any, *, keep: bool, place: Place | None = None, base: bool = True
    ) -> dict[str, Tensor] | None:
        if self.stowed is None or not self.stowed.makes_copies:
            return None
        return self.stowed.gathered(keep=keep, place=place, base=base)

    def holder(self, trainer: Any) -> Any:
        if self.stowed is None:
            return super().holder(trainer)
        return state_file.EngineState(self.stowed.access, writes=trainer.args.should_save)
