"""Out of memory: what was predicted, what was measured, and which changes of the config would free how much.

The plan has counted everything but the workspace of kernels and the slack of the allocator, so the table shows where
the missing bytes went. What each change frees is computed from the same counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.core.layout import mapped_bytes
from strategies.core.peak import backward_peak, forward_peak
from strategies.core.plan import Home, Kind, Plan
from strategies.core.sizes import human
from strategies.planner.activation_policy import FULL, SELECTIVE, by_policy, last_block
from strategies.report.table import table
from trainer.run.callbacks import device_peak_bytes, host_peak_bytes

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` means that memory of the device or the host is exhausted."""
    import torch

    from strategies.engine.memory.arena import OutOfMemoryError

    return isinstance(error, MemoryError | OutOfMemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain(config: RunConfig, plan: Plan, error: BaseException) -> list[str]:
    """Lines for people: what failed, memory by owner, and the cures."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lines = [f"out of memory: {first}"]
    for home, measured in ((Home.DEVICE, device_peak_bytes()), (Home.HOST, host_peak_bytes())):
        if measured is not None:
            mapped = mapped_bytes(plan.layout) if home is Home.HOST and plan.layout is not None else 0
            others = f" and {human(mapped)} of other ranks' memory" if mapped else ""
            size = human(plan.peak(home))
            lines.append(f"  {home.value}: {size}{others} predicted, {human(measured)} measured at the peak so far")
    parts = ((name, human(size)) for name, size in _parts(plan) if size)
    lines += [f"  {line}" for line in table(("on the device", "bytes"), parts, {"bytes"})]
    lines.append("what would free memory on the device, the most first:")
    freed = sorted(cures(config, plan), key=lambda cure: -cure[1])
    lines += [f"  {change}: {human(size)}" for change, size in freed if size > 0]
    return lines


def _parts(plan: Plan) -> Iterator[tuple[str, int]]:
    for kind in Kind:
        yield kind.value, plan.total(kind, Home.DEVICE)
    saved = sum(plan.saved_bytes(unit.name) for unit in plan.facts.units)
    yield "saved for backward", saved
    yield "temporaries of forward and backward, at most", max(0, plan.saved_peak() - saved)
    for reserve in plan.reserves(Home.DEVICE):
        yield reserve.owner, reserve.num_bytes


def cures(config: RunConfig, plan: Plan) -> Iterator[tuple[str, int]]:
    """Changes of the config, and the device bytes that each would free."""
    run, training = plan.facts.run, config.training
    saved = sum(plan.saved_bytes(unit.name) for unit in plan.facts.units)
    if run.micro_batch > 1:
        half = run.micro_batch // 2
        rest = f"per_device_train_batch_size: {half}, gradient_accumulation_steps: {run.accumulation * 2}"
        yield f"training: {{{rest}}}", saved - saved * half // run.micro_batch
    elif run.sequence > 1:
        yield f"data.max_length: {run.sequence // 2}", saved // 2
    if not (training.gradient_checkpointing or training.activation_checkpointing):
        yield from _recompute(plan)
    if plan.layout is not None:
        lower = plan.peak(Home.DEVICE) * 9 // 10
        yield f"strategies.offload.gpu_memory: {lower >> 20}MiB", plan.peak(Home.DEVICE) - lower
    elif not config.strategies:
        movable = (Kind.GRAD, Kind.MASTER, Kind.MOMENT)
        yield "strategies: {offload: {}}", sum(plan.total(kind, Home.DEVICE) for kind in movable)


def _recompute(plan: Plan) -> Iterator[tuple[str, int]]:
    """Recomputation policies that keep less than the plan does."""
    units = plan.units()
    now = plan.saved_peak()
    end = last_block(units)
    for policy, hosts in ((SELECTIVE, False), (FULL, False), (FULL, True)):
        ways = [by_policy(unit, policy, hosts=hosts and index < end) for index, unit in enumerate(units)]
        if hosts and not any(way.hosted for way in ways):
            continue
        saved = [way.saved for way in ways]
        peak = max(forward_peak(saved), backward_peak(saved, [0] * len(units)))
        words = f"policy: {policy}{', activation_offloading: true' * hosts}"
        yield f"strategies: {{recompute: {{{words}}}}}", now - peak
