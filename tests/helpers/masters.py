"""Plain training in bf16 with fp32 masters, as an optimizer: what the engine is compared with in mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class Masters:
    """AdamW on fp32 masters of all parameters of ``model``, whose gradients are clipped to ``max_norm`` (0: not).

    A step whose gradients are not finite changes nothing. The methods are those of the engine's optimizer.
    """

    def __init__(self, model: nn.Module, lr: float, max_norm: float) -> None:
        self.masters = {param: nn.Parameter(param.detach().float()) for param in model.parameters()}
        self._model, self._max_norm = model, max_norm
        self._adamw = torch.optim.AdamW(self.masters.values(), lr=lr, fused=True)
        self.skipped = 0

    @torch.no_grad()
    def step(self) -> None:
        """Gradients as fp32, clipped and applied; the weights are the rounded masters."""
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self._max_norm or torch.inf)
        if not norm.isfinite():
            self.skipped += 1
            return
        self._adamw.step()
        for param, master in self.masters.items():
            param.copy_(master)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._model.zero_grad()

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Load weights, which the masters follow."""
        self._model.load_state_dict(state)
        for param, master in self.masters.items():
            master.copy_(param)

    def present(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()
