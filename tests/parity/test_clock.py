"""The runtime on a clock against the simulator: the same plan takes the same seconds, copy by copy.

Weights travel and nothing is updated among them (a frozen base), which is what both can count exactly. Updates are
different by design: the engine looks for finished ones at borders only, the simulator at once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.facts import Facts, Home, Rates, UnitKind, Work
from strategies.core.plan import Plan
from strategies.engine import AdamW, stow
from strategies.engine.forward.checkpointing import recompute, room_of
from strategies.engine.transfer.transfer import Lane
from strategies.planner.problem import Problem
from strategies.planner.simulate import simulate
from strategies.planner.step_cost import evictions_of, problem_of
from strategies.planner.tasks import Resource
from tests.helpers.clock import Clocked, drive
from tests.helpers.fakes import GPU
from tests.helpers.models import build, tokens
from tests.helpers.pairwise import Table
from tests.unit.test_step_cost import FAST
from trainer.planning.plan_for import plan_for

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


def plan_in(model: nn.Module, rates: Rates, budget: int, prefetch: int | str) -> Plan:
    plan = plan_for(model, gpu_memory=budget, prefetch=prefetch, site="device", batch=(2, 8), max_grad_norm=None)
    return replace(plan, facts=known(plan.facts, rates))


def known(facts: Facts, rates: Rates) -> Facts:
    blocks = sum(unit.name.startswith("model.layers") for unit in facts.units)
    whole = sum(unit.num_params for unit in facts.units if unit.name != "embedding")
    block = next(unit.num_params for unit in facts.units if unit.name.startswith("model.layers"))
    run = replace(facts.run, forward_flops=round(1000 * whole / block))
    assert blocks > 2
    return replace(facts, run=run, machine=replace(GPU, rates=rates))


def driven(
    model: nn.Module, plan: Plan, problem: Problem, clock: Clocked, reads: Callable[[str], object] = lambda unit: None
) -> tuple[float, tuple[int, int]]:
    """Seconds of the last step by the clock, and its bytes up and down."""
    optimizer: Any = stow(model, plan, rule=AdamW(lr=1e-3), device="cpu", transfer=clock, beside=False)
    drive(optimizer.engine, clock, *by_unit(problem), reads)
    ends = []
    for batch in tokens("llama", STEPS):
        before = clock.bytes_up, clock.bytes_down
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(max(clock.now[Lane.COMPUTE], clock.now[Lane.UP]))
    moved = clock.bytes_up - before[0], clock.bytes_down - before[1]
    optimizer.close()
    return ends[-1] - ends[-2], moved


FACTORS = {"prefetch": ("auto", 0, 1), "factor": (0.3, 1.5, 4.0), "spare_blocks": (0, 1, 2)}


@pytest.mark.parametrize(("prefetch", "factor", "spare_blocks"), [tuple(row.values()) for row in Table(FACTORS).rows()])
def test_a_plan_takes_the_simulated_seconds(prefetch: int | str, factor: float, spare_blocks: int) -> None:
    model = frozen_base()
    probe = plan_for(model, site="device", weights="streamed", prefetch=0, batch=(2, 8), max_grad_norm=None)
    assert probe.layout is not None
    block = max(b.weight_bytes for b in probe.layout.buckets if not b.resident)
    rates = slow_link(block / factor)
    plan = plan_in(model, rates, probe.peak(Home.DEVICE) + spare_blocks * block, prefetch)
    assert plan.layout is not None and not all(b.resident for b in plan.layout.buckets)
    problem = problem_of(plan.facts, plan.layout, rates_of(plan))
    outcome = simulate(problem, list(evictions_of(problem, plan.layout)), iterations=5)

    period, (up, _) = driven(model, plan, problem, Clocked(rates_of(plan)))
    moved = sum(problem.weights[e.gap.weight].num_bytes for e in evictions_of(problem, plan.layout))
    assert period == pytest.approx(outcome.period, rel=1e-9)
    assert up == moved
    assert outcome.busy[Resource.UP] == pytest.approx(moved * factor / block)
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize(("factor", "policy"), [(0.2, "full"), (0.9, "selective"), (1.6, "full"), (5.0, "selective")])
def test_what_waits_on_the_host_takes_the_simulated_seconds(factor: float, policy: str) -> None:
    """Weights stay, inputs and products of blocks come and go; a block's copy takes so many times its forward."""
    model = frozen_base()
    options = {"policy": policy, "activation_offloading": True}
    plan = plan_for(model, site="device", weights="resident", batch=(2, 8), max_grad_norm=None, recompute=options)
    block = max(plan.keep(unit.name).hosted_bytes for unit in plan.facts.units)
    plan = replace(plan, facts=known(plan.facts, slow_link(block / factor)))
    assert plan.layout is not None
    kept = plan.facts_as_kept()
    again = (replace(unit, again=Work(flops=1000 * bool(unit.hosted_bytes))) for unit in kept.units)
    problem = problem_of(replace(kept, units=tuple(again)), plan.layout, rates_of(plan))
    outcome = simulate(problem, (), iterations=5)

    clock = Clocked(rates_of(plan))
    recompute(model, plan, clock)
    room, blocks = room_of(model), [unit.name for unit in plan.facts.units if unit.kind is UnitKind.BLOCK]
    assert room is not None

    def reads(unit: str) -> None:
        for ref in room._sent.get(blocks.index(unit), []) if unit in blocks else []:
            sent = ref()
            assert sent is None or sent.tensor is not None, "it has not begun to come up"
            clock.wait(Lane.COMPUTE, sent.up if sent else None)

    period, moved = driven(model, plan, problem, clock, reads)
    assert period == pytest.approx(outcome.period, rel=1e-9)
    assert (outcome.period > problem.compute_seconds * 1.01) is (factor > 1)
    sent = sum(step.hosted_bytes for step in problem.ticks)
    assert sent > 0 and moved == (sent, sent)


def by_unit(problem: Problem) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of forward and of backward."""
    forward, backward = dict[str, float](), dict[str, float]()
    for step in problem.ticks:
        direction, _, unit = step.name.partition(" ")
        (forward if direction == "forward" else backward)[unit] = step.seconds
    return forward, backward


def rates_of(plan: Plan) -> Rates:
    rates = plan.facts.machine.rates
    assert rates is not None
    return rates
