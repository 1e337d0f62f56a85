"""Ranks divide the experts of a mixture: around plain data parallelism, or around ZeRO 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from deepstow.strategies.parallel.expert_parts import ExpertParts, divide_groups
from deepstow.trainer.execution.base import Around, Execution, Place


class Experts(Around):
    """``parts``: the experts that this rank has."""

    forward_is_collective = True

    def __init__(self, inner: Execution, parts: ExpertParts) -> None:
        super().__init__(inner)
        self.experts: ExpertParts = parts

    def follow(self, optimizer: Any, model: Any) -> None:
        self.inner.follow(optimizer, model)
        if self.experts.is_in_zero:
            divide_groups(optimizer)

    def backward(self, loss: Tensor, accelerator: Any, backward: Callable[..., None], **options: Any) -> None:
        """DistributedDataParallel leaves gradients of experts out; they are completed after a step's last backward."""
        self.inner.backward(loss, accelerator, backward, **options)
        if accelerator.sync_gradients and not self.experts.is_in_zero:
            self.experts.complete()

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, accelerator: Any, clip: Any) -> Any:
        if self.experts.is_in_zero:
            return self.inner.clip(parameters, max_norm, norm_type, accelerator, clip)
        return self.experts.clip(parameters, max_norm)

    def figures(self) -> dict[str, float]:
        return {**self.inner.figures(), **self.experts.figures()}

    def gathered(
        self, model: Any, *, keep: bool, place: Place | None = None, base: bool = True
    ) -> dict[str, Tensor] | None:
        return self.experts.state_dict(model, keep=keep, place=place)

    def holder(self, trainer: Any) -> Any:
        if self.experts.is_in_zero:
            return self.inner.holder(trainer)
        return self.experts.state(trainer.inner_optimizer, trainer.model)
