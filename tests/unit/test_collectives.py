"""What exchanges inside and across machines are predicted to take, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepstow.strategies.collectives import Collectives
from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, MachineFacts
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.planner.network import (
    GATHERS,
    Cluster,
    Wire,
    best,
    gather_rate,
    leaving,
    phases,
    sums_slowdown,
)
from deepstow.strategies.plugins.two_level import average_gradients
from deepstow.strategies.report import plan_table
from tests.helpers.fakes import block, embedding, facts
from tests.unit.test_rates import some_rates

SIZE = 1 << 24
PAIRS = Cluster(4, 2, Wire(4e6), Wire(1e6))


def machines(ranks: int, here: int, across: float | None = 1e9) -> Facts:
    rates = some_rates(net_bytes_per_s=4e9, net_across_bytes_per_s=across)
    machine = MachineFacts("test gpu", 1 << 40, 1 << 40, rates=rates, ranks=here)
    return facts(embedding(10_000_000), block(0, 10_000_000), machine=machine, world_size=ranks)


def narrowed(known: Facts, **options: Any) -> Facts:
    return Collectives(**options).narrowed(known, 0)


def test_seconds_of_phases() -> None:
    inside, across = SIZE / 2 / 4e6, SIZE / 2 / 2 / 1e6
    assert phases(PAIRS, SIZE, 1) == pytest.approx(2 * inside + 2 * across)
    assert phases(PAIRS, SIZE, 1, GATHERS) == pytest.approx(inside + across)
    assert PAIRS.all_reduce_seconds(SIZE, 4) == pytest.approx(1.5 * SIZE / 2e6)
    # Two slices: the first one is inside, then always one is across, then the last one is inside.
    assert phases(PAIRS, SIZE, 2) == pytest.approx(inside / 2 * 2 + 2 * across)
    many = [phases(PAIRS, SIZE, slices) for slices in (1, 2, 4, 8, 64)]
    assert many == sorted(many, reverse=True) and many[-1] >= 2 * across
    assert best(PAIRS, SIZE) == 8
    assert best(replace(PAIRS, across=Wire(1e6, SIZE / 1e6)), SIZE) == 1


def test_the_engine_is_priced_by_the_same_phases() -> None:
    known = machines(4, 2)
    flat, here = known, narrowed(known, slices=4)
    rates = known.machine.rates
    assert rates is not None
    assert sums_slowdown(here, rates, "exact") == pytest.approx(1.0, rel=0.2)
    assert gather_rate(here, rates) / sums_slowdown(here, rates, "exact") > gather_rate(flat, rates) / sums_slowdown(
        flat, rates, "exact"
    )
    assert leaving(flat, "exact") == 0.5 and leaving(here, "exact") == 0.25


def test_the_plan_says_what_is_chosen_and_why() -> None:
    plan = compose({"collectives": Collectives()}, narrowed(machines(4, 2)))
    (line,) = (each.reason for each, by in plan.answers.values() if by == "collectives")
    best = plan.facts.run.two_level
    assert best > 1 and f"then across 2, in {best} slices: all-reduce of" in line and "of all ranks at once" in line
    assert line in plan_table.summary(plan)
    unknown = narrowed(machines(4, 2, across=None))
    assert unknown.run.two_level == 2
    for idle in (machines(4, 4), machines(4, 1)):
        assert "collectives" in compose({"collectives": Collectives()}, narrowed(idle)).idle


def test_refused() -> None:
    with pytest.raises(Refusal, match="6 ranks are on machines of 4"):
        narrowed(machines(6, 4))
    for each, written in ((Collectives(hierarchical=True), ".hierarchical = true"), (Collectives(slices=2), " = {")):
        (line,) = map(str, each.refuses_machines([0, 0, 0, 3]))
        assert line.startswith(f"strategies.collectives{written}"), "as the file has it"
        assert line.endswith(": machines have 3 and 1 ranks; start as many on each, or leave it out")
    assert not list(each.refuses_machines([0, 0, 2, 2]))
    assert "not neighbours" in str(*each.refuses_machines([0, 2, 0, 2]))


def test_where_a_rank_has_no_gradient_it_gives_zeros() -> None:
    """Every rank's message has the same length, as under DeepSpeed, whose optimizer updates with zeros."""
    used, unused, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    used.grad = torch.ones(3)
    frozen.requires_grad_(False)
    sizes = list[int]()
    ring: Any = SimpleNamespace(ranks=2, room=lambda size: size, all_reduce=lambda flat, _: sizes.append(flat.numel()))
    average_gradients(ring, [used, unused, frozen])
    assert sizes == [6] and used.grad.eq(0.5).all() and frozen.grad is None
    assert unused.grad is not None and unused.grad.eq(0).all()
