"""Plain torch, and this project's memory engine.

A subject is a class: made from the work, the model (on the CPU, in the work's precision) and the device, it can then
do a micro-batch, an update, and finish what it has put off. Its ``notes`` say where it could not do the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.work import Work

Batch = Mapping[str, Tensor]


class Unavailable(Exception):
    """The subject cannot run here; the message is its row in the table."""


class Trained:
    """Base of all subjects: the plain way to do each part."""

    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    model: nn.Module
    optimizer: Any

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work, self.device = work, device

    def micro_batch(self, batch: Batch) -> Tensor:
        """Forward and backward; the loss, not divided."""
        loss: Tensor = self.model(**batch).loss
        (loss / self.work.accumulation).backward()
        return loss.detach()

    def update(self) -> None:
        """Clip, step, clear: once per optimizer step."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.work.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        """Finish updates that have been put off; before the clock is stopped."""

    def expect_another(self) -> None:
        """After a micro-batch: one more will come before any update. Gradients keep the memory that they have."""

    def discard(self, batch: Batch) -> None:
        """Forget the gradients of micro-batches that no update followed; who cannot trains on ``batch`` and updates."""
        self.model.zero_grad()

    def planned_device_bytes(self) -> int | None:
        """What the subject itself has laid out on the device, where it knows."""
        return None

    def close(self) -> None:
        """Give back threads and groups."""


class Plain(Trained):
    """A torch loop with everything on the device. In bf16: bf16 weights compute, fp32 masters are updated."""

    def __init__(self, work: Work, model: nn.Module, device: torch.device) -> None:
        super().__init__(work, device)
        self.model = model.to(device)
        self.params: list[Tensor] = list(model.parameters())
        self.mixed = work.dtype == "bf16"
        self.masters: list[Tensor] = (
            [p.detach().float().requires_grad_() for p in self.params] if self.mixed else self.params
        )
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **work.adamw)
        self.settings = {"optimizer": "torch.optim.AdamW(fused=True)", "fp32_masters": self.mixed}

    def update(self) -> None:
        """With masters: gradients are converted one by one, so that both sets never exist in full."""
        if self.mixed:
            for param, master in zip(self.params, self.masters, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, self.work.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.mixed:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)


class Ours(Trained):
    """The memory engine, with a plan made for this model, batch and budget. Updates may overlap the next forward."""

    def __init__(self, work: Work, model: nn.Module, device: torch.device, **options: Any) -> None:
        from strategies.engine import AdamW, stow
        from strategies.report.plan_table import table
        from trainer.planning.plan_for import plan_for

        super().__init__(work, device)
        self.model = model
        batch, count, norm = (work.rows, work.length), work.accumulation, work.max_grad_norm
        self.plan = plan_for(model, batch=batch, accumulation=count, max_grad_norm=norm, **options)
        print(table(self.plan), flush=True)
        self.optimizer = stow(model, self.plan, rule=AdamW(**work.adamw), device=device)
        self.settings = options

    def update(self) -> None:
        """The optimizer clips itself: where its gradients lie is its own affair."""
        self.optimizer.clip_grad_norm_(self.work.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        """The updates that would have run under the next forward."""
        self.optimizer.drain()

    def expect_another(self) -> None:
        """The engine takes as many micro-batches per update as were planned, so these are forgotten. The memory of
        gradients is reserved and stays."""
        self.optimizer.zero_grad()

    def discard(self, batch: Batch) -> None:
        """The engine holds the gradients."""
        self.optimizer.zero_grad()

    def planned_device_bytes(self) -> int | None:
        """The arena's part on the device."""
        return int(self.optimizer.device_bytes)
