"""Plain torch, this project's memory engine, ways to keep less for backward, and routes of linear layers.

A contender is a class that is constructed with the work, the model (on the CPU, in the work's precision) and the
device. It can run a micro-batch, update, and finish the updates that it deferred. Its ``notes`` say in which respect it
could not do the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.benchmarks.harness.work import Work
from deepstow.strategies.engine.forward.compiled import compile_blocks
from deepstow.trainer.errors import first_line

Batch = Mapping[str, Tensor]


class Unavailable(Exception):
    """The contender cannot run here; the message is shown in the table."""


class Trained:
    """Base of all contenders: the plain way to do each part."""

    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    planned_device_bytes: int | None = None  # of a contender that plans
    model: nn.Module
    optimizer: Any

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work, self.device = work, device

    def micro_batch(self, batch: Batch) -> Tensor:
        """Run forward and backward; return the loss before division by the accumulation."""
        loss: Tensor = self.model(**batch).loss
        (loss / self.work.accumulation).backward()
        return loss.detach()

    def update(self) -> None:
        """Clip, step and clear the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.work.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        """Finish deferred updates. Called before the clock stops."""

    def expect_another(self) -> None:
        """Prepare for another micro-batch before any update. The memory of gradients must stay allocated."""

    def discard(self, batch: Batch) -> None:
        """Discard gradients that no update followed. A contender that cannot trains on ``batch`` until it updates."""
        self.model.zero_grad()

    def close(self) -> None:
        """Release threads and process groups."""


def prepare(model: Any, device: torch.device, compiled: str, attention: str, liger: bool = False) -> None:
    """Compile blocks by a backend, choose the attention, or replace kernels by Liger's. Unavailable: not here."""
    from deepstow.strategies.parallel import varlen

    if attention == varlen.NAME:
        varlen.register()
    if device.type == "cpu" and (liger or attention.startswith("flash")):
        raise Unavailable("needs a GPU")
    try:
        if liger:
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(model, None)
        if attention:
            model.set_attn_implementation(attention)
        if attention == varlen.NAME:
            varlen.prepare(model)
    except ImportError as error:
        raise Unavailable(first_line(error)) from error
    if compiled:
        compile_blocks(model, compiled)


class Plain(Trained):
    """A torch loop with everything on the device. In bf16, weights are bf16 and the optimizer updates fp32 masters.

    Over ranks every micro-batch is averaged, as torch's data parallelism does it.
    """

    def __init__(
        self, work: Work, model: nn.Module, device: torch.device, *, compiled: str = "", attention: str = "",
        liger: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(work, device)
        prepare(model, device, compiled, attention, liger)
        self.model = model.to(device)
        self.params: list[Tensor] = list(model.parameters())
        if work.ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.mixed = work.dtype == "bf16"
        self.masters: list[Tensor] = (
            [p.detach().float().requires_grad_() for p in self.params] if self.mixed else self.params
        )
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **work.adamw)
        self.settings = {"optimizer": "torch.optim.AdamW(fused=True)", "fp32_masters": self.mixed}

    def update(self) -> None:
        """Convert gradients to those of the masters one by one, so that never all of both exist."""
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
    """The memory engine with a plan for this model, batch and budget. Updates may overlap the next forward."""

    def __init__(
        self, work: Work, model: nn.Module, device: torch.device, *, compiled: str = "", attention: str = "",
        liger: bool = False, on_disk: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        from deepstow.strategies.core.facts import Tier
        from deepstow.strategies.core.on_disk import disk_bytes
        from deepstow.strategies.core.sizes import OVERHEAD_BYTES
        from deepstow.strategies.engine import AdamW, stow
        from deepstow.strategies.planner.step_cost import plan_cost
        from deepstow.strategies.report.plan_table import table
        from deepstow.trainer.planning.plan_for import plan_for

        super().__init__(work, device)
        if on_disk and not work.disk:
            raise Unavailable("needs --disk")
        if on_disk:
            options |= {"disk": work.disk, "disk_memory": "1TiB"}
        options["host_memory"] = work.host_memory
        if "gpu_memory" in options:  # of all that is on the device; a plan is for its tensors
            options["gpu_memory"] -= OVERHEAD_BYTES.get(device.type, 0)
        prepare(model, device, compiled, attention)
        self.model = model
        batch = (work.rows, work.length)
        count = work.accumulation
        norm = work.max_grad_norm
        plan = plan_for(
            model, batch=batch, eval_rows=0, accumulation=count, max_grad_norm=norm, world_size=work.ranks, **options
        )
        print(table(plan), flush=True)
        prepare(model, device, "", "", liger)  # whose kernels cannot be counted in a live model: planned without
        if on_disk and (plan.layout is None or not disk_bytes(plan.layout)):
            raise Unavailable("memory has room for all state, so none is on the disk: give a smaller --host-memory")
        self.optimizer = stow(model, plan, rule=AdamW(**work.adamw), device=device)
        self.planned_device_bytes = self.optimizer.device_bytes
        cost = plan_cost(plan)
        self.settings = {
            **options,
            "predicted_step_s": cost.seconds if cost else None,
            "predicted_device_bytes": plan.peak(Tier.DEVICE),
            "predicted_host_bytes": plan.peak(Tier.HOST),
        }

    def update(self) -> None:
        """The engine's optimizer clips: it alone knows where gradients are."""
        self.optimizer.clip_grad_norm_(self.work.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        self.optimizer.drain()

    def expect_another(self) -> None:
        """The engine takes no more micro-batches per update than planned. The plan reserves the gradients' memory."""
        self.optimizer.zero_grad()

    def discard(self, batch: Batch) -> None:
        self.optimizer.zero_grad()


# --- less kept for backward; all with plain torch's optimizer -------------------------------------------------------


class Recomputed(Plain):
    """``strategies.recompute``; for ``auto``, ``share`` is the budget between the predicted peaks of full and none."""

    def __init__(
        self, work: Work, model: nn.Module, device: torch.device, *, policy: str, on_host: bool = False,
        share: float | None = None,
    ) -> None:  # fmt: skip
        from deepstow.strategies.core.compose import compose
        from deepstow.strategies.core.plan import Tier
        from deepstow.strategies.core.registry import find
        from deepstow.strategies.core.sizes import SHARE
        from deepstow.strategies.report import full_report
        from deepstow.trainer.planning.plan_for import plan_for

        options: Any = find("recompute")
        facts = plan_for(model, eval_rows=0, batch=(work.rows, work.length), max_grad_norm=work.max_grad_norm).facts
        # With several micro-batches gradients and saved tensors exist together, so that there is only one peak.
        facts = replace(facts, run=replace(facts.run, accumulation=2))
        if share is not None:
            policies = (options(policy=name) for name in ("full", "none"))
            least, most = (compose({"recompute": option}, facts).peak(Tier.DEVICE) for option in policies)
            budget = least + share * (most - least)
            usable = SHARE if facts.machine.has_accelerator else 1.0  # auto leaves a part of an accelerator unused
            facts = replace(facts, machine=replace(facts.machine, device_bytes=int(budget / usable) + 1))
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
            "budget_for_saved_bytes": int(budget - plan.states(Tier.DEVICE)) if share is not None else None,
        }


class Routed(Plain):
    """``strategies.linear``; for ``adaptive`` the products are measured first."""

    def __init__(self, work: Work, model: nn.Module, device: torch.device, *, transpose: str) -> None:
        from deepstow.strategies.core.compose import compose
        from deepstow.strategies.core.registry import find
        from deepstow.strategies.engine.forward.routed_linear import Routed as RoutedLayer
        from deepstow.trainer.planning.plan_for import plan_for

        strategy = find("linear").model_validate({"transpose": transpose})
        norm, batch = work.max_grad_norm, (work.rows, work.length)
        facts = plan_for(model, batch=batch, eval_rows=0, accumulation=work.accumulation, max_grad_norm=norm).facts
        model.to(device)
        strategy.apply(model, compose({"linear": strategy}, facts))
        super().__init__(work, model, device)
        routed = {path: layer for path, layer in model.named_modules() if isinstance(layer, RoutedLayer)}
        self.settings = {**self.settings, "routes": {path: str(layer._routes) for path, layer in routed.items()}}


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
