"""Out of memory: what was predicted, what was measured, and which changes of the config would free how much.

The plan has counted everything but the workspace of kernels and the slack of the allocator, so its table shows where
the missing bytes went. What each change frees is computed from the same counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepstow.strategies.core.layout import mapped_bytes
from deepstow.strategies.core.plan import Kind, Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.activation_policy import FULL, SELECTIVE, by_policy, last_block
from deepstow.strategies.report import plan_table
from deepstow.trainer.run.callbacks.reports import device_peak_bytes, host_peak_bytes

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` means that memory of the device or the host is exhausted."""
    import torch

    from deepstow.strategies.engine.memory.arena import OutOfMemoryError

    return isinstance(error, MemoryError | OutOfMemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain(config: RunConfig, plan: Plan, error: BaseException) -> list[str]:
    """Lines for people: what failed, memory by owner as the plan has it, what was measured, and the cures."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    temporaries = max(0, plan.saved_peak() - sum(plan.saved_bytes(unit.name) for unit in plan.facts.units))
    lines = [f"out of memory: {first}", *plan_table.table(plan).splitlines()]
    lines.append(f"temporaries of forward and backward, at most: {human(temporaries)}")
    for tier, measured in ((Tier.DEVICE, device_peak_bytes()), (Tier.HOST, host_peak_bytes())):
        mapped = mapped_bytes(plan.layout) if tier is Tier.HOST and plan.layout is not None else 0
        shared = f", up to {human(mapped)} of it other ranks'" if mapped else ""
        lines += [f"measured peak so far, {tier.value}: {human(measured)}{shared}"] if measured is not None else []
    lines.append("what would free memory on the device, the most first:")
    freed = sorted(cures(config, plan), key=lambda cure: -cure[1])
    return lines + [f"  {change}: {human(size)}" for change, size in freed if size > 0]


def cures(config: RunConfig, plan: Plan) -> Iterator[tuple[str, int]]:
    """Changes of the config, and the device bytes that each would free."""
    run = plan.facts.run
    training = config.training
    units = plan.units()
    saved = sum(plan.saved_bytes(unit.name) for unit in units)
    if run.micro_batch > 1:
        half_batch = run.micro_batch // 2
        change = f"per_device_train_batch_size: {half_batch}, gradient_accumulation_steps: {run.micro_batches * 2}"
        yield f"training: {{{change}}}", saved - saved * half_batch // run.micro_batch
    elif run.sequence > 1:
        yield f"data.max_length: {run.sequence // 2}", saved // 2
    if not (training.gradient_checkpointing or training.activation_checkpointing):
        end = last_block(units)
        for policy, hosts in ((SELECTIVE, False), (FULL, False), (FULL, True)):
            ways = [by_policy(unit, policy, hosts=hosts and index < end) for index, unit in enumerate(units)]
            if not hosts or any(way.hosted for way in ways):
                words = f"policy: {policy}{', activation_offloading: true' * hosts}"
                peak = plan.passes_peak([way.saved for way in ways], [0] * len(units))
                yield f"strategies: {{recompute: {{{words}}}}}", plan.saved_peak() - peak
    if plan.layout is not None:
        lower = plan.peak(Tier.DEVICE) * 9 // 10
        yield f"strategies.offload.gpu_memory: {lower >> 20}MiB", plan.peak(Tier.DEVICE) - lower
    elif not config.strategies:
        movable = (Kind.GRAD, Kind.MASTER, Kind.MOMENT)
        yield "strategies: {offload: {}}", sum(plan.total(kind, Tier.DEVICE) for kind in movable)
