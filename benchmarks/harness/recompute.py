"""Ways to keep less for backward: this project's, Hugging Face's checkpointing, and torch.compile's memory budget.

All train with plain torch's optimizer and differ only in what forward keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.contenders import Batch, Plain
from benchmarks.harness.work import Work


class Recomputed(Plain):
    """``strategies.recompute``; for ``auto``, ``share`` is the budget between the predicted peaks of full and none."""

    def __init__(
        self, work: Work, model: nn.Module, device: torch.device, *, policy: str, on_host: bool = False,
        share: float | None = None,
    ) -> None:  # fmt: skip
        from strategies.core.compose import compose
        from strategies.core.plan import Home
        from strategies.core.registry import find
        from strategies.core.sizes import SHARE
        from strategies.report import full_report
        from trainer.planning.plan_for import plan_for

        options: Any = find("recompute")
        facts = plan_for(model, batch=(work.rows, work.length), max_grad_norm=work.max_grad_norm).facts
        # With several micro-batches gradients and saved tensors exist together, so that there is only one peak.
        facts = replace(facts, run=replace(facts.run, accumulation=2))
        if share is not None:
            policies = (options(policy=name) for name in ("full", "none"))
            least, most = (compose({"recompute": each}, facts).peak(Home.DEVICE) for each in policies)
            budget = least + share * (most - least)
            left = SHARE if facts.machine.has_accelerator else 1.0  # auto leaves a part of an accelerator unused
            facts = replace(facts, machine=replace(facts.machine, device_bytes=int(budget / left) + 1))
        strategy = options(policy=policy, activation_offloading=on_host)
        plan = compose({"recompute": strategy}, facts)
        print(full_report.text(plan, None), flush=True)
        strategy.apply(model, plan)
        super().__init__(work, model, device)
        self.settings = {
            **self.settings,
            "policy": policy,
            "blocks": sum(plan.keep(unit.name).recomputes for unit in facts.units),
            "saved_bytes": sum(plan.saved_bytes(unit.name) for unit in facts.units),
            "hosted_bytes": plan.hosted_bytes(),
            "saved_peak_bytes": plan.saved_peak(),
            "budget_for_saved_bytes": int(budget - plan.states(Home.DEVICE)) if share is not None else None,
        }


class HuggingFace(Plain):
    """``gradient_checkpointing``, not reentrant."""

    def __init__(self, work: Work, model: Any, device: torch.device) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        super().__init__(work, model, device)
        self.settings = {**self.settings, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


class OnCpu(HuggingFace):
    """The same, with ``torch.autograd.graph.save_on_cpu`` around forward; pinned memory on an accelerator."""

    def micro_batch(self, batch: Batch) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=self.device.type != "cpu"):
            return super().micro_batch(batch)


class Compiled(Plain):
    """``torch.compile`` of the whole model with its activation memory budget; 1 is its default."""

    def __init__(self, work: Work, model: nn.Module, device: torch.device, *, budget: float) -> None:
        import torch._functorch.config as functorch

        super().__init__(work, model, device)
        functorch.activation_memory_budget = budget
        compiled: Any = torch.compile(self.model, dynamic=False)
        self.model = compiled
        self.settings = {**self.settings, "torch.compile": {"dynamic": False}, "activation_memory_budget": budget}
