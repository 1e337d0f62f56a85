"""DeepSpeed's engine reduces, clips and steps inside of its ``backward``.

Under stage 0 in fp32 it would multiply by the reciprocal of the norm and report no norm. Gradients are whole on every
rank after reduction there, so torch's own clipping runs between backward and step, with the bits of plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.engine.ranks.two_level import TwoLevel
from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.plugins import two_level
from deepstow.trainer.execution.base import Execution


class Zero(Execution):
    """``max_grad_norm``: what torch clips by, 0: nothing; None: DeepSpeed clips. ``exchange``: what gradients are
    averaged by there, in place of DeepSpeed's ring.
    """

    def __init__(self, grid: Grid, max_grad_norm: float | None, exchange: TwoLevel | None) -> None:
        super().__init__(grid)
        self._max_grad_norm = max_grad_norm
        self._exchange = exchange
        self._norm: Tensor | None = None

    def backward(self, loss: Tensor, accelerator: Any, backward: Callable[..., None], **options: Any) -> None:
        """Backward, and the step when gradients are complete."""
        if self._max_grad_norm is None:
            backward(loss, **options)
            return
        engine = accelerator.deepspeed_engine_wrapped.engine
        engine.set_gradient_accumulation_boundary(is_boundary=accelerator.sync_gradients)
        with engine.no_sync() if self._exchange is not None else nullcontext():
            engine.backward(loss, **options)
        if accelerator.sync_gradients:
            if self._exchange is not None:
                two_level.average_gradients(self._exchange, engine.module.parameters())
            limit = self._max_grad_norm or float("inf")  # 0 switches clipping off; the norm is still logged
            clip = tensor_shards.clip_grad_norm_ if self.grid.tensor > 1 else clip_grad_norm_
            self._norm = clip(engine.module.parameters(), limit)
            engine.step()

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, accelerator: Any, clip: Any) -> Any:
        return clip(parameters, max_norm, norm_type) if self._norm is None else self._norm

    def holder(self, trainer: Any) -> Any:
        from deepstow.strategies.parallel.deepspeed_state import DeepSpeedState

        return DeepSpeedState(trainer.model_wrapped, trainer.model)
