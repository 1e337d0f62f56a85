"""Edits of the config that would make the step faster, each planned again, ranked by tokens per second.

They are ranked by the estimate that also ranks layouts (``step_cost.py``), before and after the edit, so that all of
them together cost less than one plan. An edit that changes the training itself (its batch, its clipping) says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepstow.strategies.core.facts import Facts, Precision
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.budget import device_budget
from deepstow.strategies.planner.placement_search import PlacementSearch
from deepstow.strategies.planner.places import OffloadRequest

SHOWN = 3
WORTH = 0.01  # a gain that is worth a line


def ranked(facts: Facts, request: OffloadRequest, saved_bytes: int) -> dict[str, float]:
    """The edits that gain the most, the best first; empty if the machine's rates are unknown.

    Each has its gain: 0.25 is a quarter more tokens per second.
    """
    speed = _speed(facts, request, saved_bytes)
    gains = {}
    for change, edited_facts, edited_request, saved in _edits(facts, request, saved_bytes) if speed else ():
        gains[change] = _speed(edited_facts, edited_request, saved) / speed - 1
    best = sorted(gains, key=lambda change: -gains[change])[:SHOWN]
    return {change: gains[change] for change in best if gains[change] > WORTH}


def _speed(facts: Facts, request: OffloadRequest, saved_bytes: int) -> float:
    """Tokens per second; 0 if it does not fit or the rates are unknown."""
    seconds = PlacementSearch(facts, request, saved_bytes).estimated()
    return facts.run.tokens_per_step / seconds if seconds else 0.0


def _edits(facts: Facts, request: OffloadRequest, saved: int) -> Iterator[tuple[str, Facts, OffloadRequest, int]]:
    run, machine = facts.run, facts.machine
    larger = replace(run, micro_batch=2 * run.micro_batch, forward_flops=2 * run.forward_flops)
    units = [replace(unit, again=unit.again + unit.again, hosted_bytes=2 * unit.hosted_bytes) for unit in facts.units]
    yield (
        f"training.per_device_train_batch_size: {larger.micro_batch} (a batch of twice as many)",
        replace(facts, run=larger, units=tuple(units)),
        request,
        2 * saved,
    )
    if run.layerwise == 1:  # else twice as much is saved at a time
        longer = replace(run, accumulation=2 * run.accumulation)
        yield (
            f"training.gradient_accumulation_steps: {longer.accumulation} (a batch of twice as many)",
            replace(facts, run=longer),
            request,
            saved,
        )
    budget = device_budget(machine)
    if budget > request.device_bytes and machine.has_accelerator:
        yield (f"strategies.offload.gpu_memory: {human(budget)}", facts, replace(request, device_bytes=budget), saved)
    if run.max_grad_norm > 0:
        unclipped = replace(facts, run=replace(run, max_grad_norm=0.0))
        yield ("training.max_grad_norm: 0 (nothing is clipped)", unclipped, replace(request, in_backward=True), saved)
    if request.site != "auto" or request.weights != "auto" or request.gradients != "auto":
        free = replace(request, site="auto" if request.moments_as == "fp32" else request.site)
        free = replace(free, weights="auto", gradients="auto")
        yield ("strategies.offload.site, weights, gradients: auto", facts, free, saved)
    if request.shards > 2 and request.reduction == "exact":
        summed = replace(request, reduction="fast")
        yield ("strategies.offload.reduction: fast (adds in another order)", facts, summed, saved)
    if run.precision is Precision.FP32 and machine.rates is not None and machine.rates.gemm_bf16_flops_per_s:
        half = replace(run, precision=Precision.BF16)
        params = tuple(replace(p, dtype="bfloat16") if p.dtype == "float32" else p for p in facts.params)
        yield ("training.bf16: true (rounds otherwise)", replace(facts, run=half, params=params), request, saved)
