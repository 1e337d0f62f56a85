"""The runtime on a clock against the simulator: the same plan takes the same seconds, copy by copy.

Weights travel and nothing is updated among them (a frozen base), which is what both can count exactly. Updates are
different by design: the engine looks for finished ones at borders only, the simulator at once.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.core.facts import Facts, Rates, Tier
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.engine.transfer.transfer import Stream
from deepstow.strategies.planner.problem import Problem
from deepstow.strategies.planner.simulate import simulate
from deepstow.strategies.planner.step_cost import evictions_of, problem_of
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.clock import Clocked, drive
from tests.helpers.engine import planned
from tests.helpers.fakes import GPU
from tests.helpers.models import build, tokens
from tests.helpers.pairwise import Table
from tests.unit.test_step_cost import FAST

STEPS = 6


def slow_link(bytes_per_s: float) -> Rates:
    """Only the link takes time, and compute: a thousand operations a second, of which a block's forward has as many."""
    return replace(FAST, gemm_fp32_flops_per_s=1000.0, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)


def frozen_base() -> nn.Module:
    """Only the embedding learns, so that backward goes through every block."""
    model = build("llama")
    for name, param in model.named_parameters():
        param.requires_grad_("embed" in name)
    return model


@cache
def counted() -> Facts:
    """Once for all plans."""
    return plan_for(frozen_base(), eval_rows=0, batch=(2, 8), max_grad_norm=None).facts


def known(facts: Facts, rates: Rates) -> Facts:
    blocks = sum(unit.name.startswith("model.layers") for unit in facts.units)
    whole = sum(unit.num_params for unit in facts.units if unit.name != "embedding")
    block = next(unit.num_params for unit in facts.units if unit.name.startswith("model.layers"))
    run = replace(facts.run, forward_flops=round(1000 * whole / block))
    assert blocks > 2
    return replace(facts, run=run, machine=replace(GPU, rates=rates))


def driven(model: nn.Module, plan: Plan, problem: Problem, clock: Clocked) -> tuple[float, int]:
    """Seconds of the last step by the clock, and its bytes up."""
    optimizer: Any = stow(model, plan, rule=AdamW(lr=1e-3), device="cpu", transfer=clock, beside=False)
    seconds = [{tick.name.partition(" ")[2]: tick.seconds for tick in problem.ticks if tick.name.startswith(direction)}
               for direction in ("forward", "backward")]  # fmt: skip
    drive(optimizer.engine, clock, *seconds)
    ends = []
    count = plan.facts.run.layerwise
    for batch in tokens("llama", STEPS):
        before = clock.bytes_up
        optimizer.backward_all([lambda batch=batch: model(**batch).loss] * count)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(max(clock.now[Stream.COMPUTE], clock.now[Stream.UP]))
    moved = clock.bytes_up - before
    optimizer.close()
    return ends[-1] - ends[-2], moved


FACTORS = {"prefetch": ("auto", 0, 1), "factor": (0.3, 1.5, 4.0), "spare_blocks": (0, 1, 2), "together": (1, 3)}


@pytest.mark.parametrize(tuple(FACTORS), [tuple(row.values()) for row in Table(FACTORS).rows()])
def test_a_plan_takes_the_simulated_seconds(
    prefetch: int | str, factor: float, spare_blocks: int, together: int
) -> None:
    """Also where micro-batches take turns in each layer, and the link has the time of all of them."""
    model, facts = frozen_base(), counted()
    facts = replace(facts, run=replace(facts.run, layerwise=together))
    factor *= together
    probe = planned(facts, site="device", weights="streamed", prefetch=0)
    assert probe.layout is not None
    block = max(b.weight_bytes for b in probe.layout.buckets if not b.resident)
    rates = slow_link(block / factor)
    most = probe.peak(Tier.DEVICE) + spare_blocks * block
    plan = planned(facts, site="device", gpu_memory=most, prefetch=prefetch)
    assert plan.layout is not None and not all(b.resident for b in plan.layout.buckets)
    problem = problem_of(known(plan.facts, rates), plan.layout, rates)
    outcome = simulate(problem, list(evictions_of(problem, plan.layout)), iterations=5)

    period, up = driven(model, plan, problem, Clocked(rates))
    moved = sum(problem.weights[e.gap.weight].num_bytes for e in evictions_of(problem, plan.layout))
    assert period == pytest.approx(outcome.period, rel=1e-9)
    assert up == moved
    assert outcome.busy[Resource.UP] == pytest.approx(moved * factor / block)
    assert all(torch.isfinite(param).all() for param in model.parameters())
