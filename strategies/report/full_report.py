"""The plan with its cost: what people read before a run, and what programs read after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from strategies.core.plan import Plan
from strategies.planner import gemm_routes
from strategies.planner.step_cost import StepCost
from strategies.planner.tasks import Resource
from strategies.report import bucket_table, plan_table, recompute_table
from strategies.report.table import table


def text(plan: Plan, cost: StepCost | None) -> str:
    """The plan, the routes of linear layers, recomputation, the buckets, and the simulated step."""
    step = step_lines(cost) if cost else ()
    parts = map(list, (gemm_routes.lines(plan), recompute_table.lines(plan), bucket_table.lines(plan), step))
    return "\n".join([plan_table.table(plan), *(line for part in parts if part for line in ("", *part))])


def to_json(plan: Plan, cost: StepCost | None) -> dict[str, Any]:
    """``plan_table.to_json`` and ``linears`` (routes by path), ``recompute``, ``buckets``, ``simulated`` (the cost)."""
    return {
        **plan_table.to_json(plan),
        "linears": {path: asdict(routes) for path, routes in gemm_routes.chosen(plan).items()},
        "recompute": recompute_table.to_json(plan),
        "buckets": bucket_table.to_json(plan),
        "simulated": cost.to_json() if cost else None,
    }


def headline(cost: StepCost) -> str:
    """The simulated step on one line."""
    return (
        f"simulated step: {cost.seconds:.3g} s, of which forward and backward {cost.compute_seconds:.3g} s "
        f"({cost.compute_seconds / cost.seconds:.0%}); {cost.outcome.binds.value} binds; rates: {cost.origin}"
    )


def step_lines(cost: StepCost) -> Iterator[str]:
    """The simulated step, and per resource: how long it is busy, how much of that compute hides, what binds."""
    out = cost.outcome
    rows = []
    for resource in Resource:
        busy, critical = out.busy[resource], out.critical[resource]
        if busy > 0:
            hidden = "" if resource is Resource.COMPUTE else f"{out.hidden[resource] / busy:.0%}"
            share = f"{critical:.3g} s ({critical / cost.seconds:.0%})"
            rows.append((resource.value, f"{busy:.3g} s", hidden, share))
    yield headline(cost)
    yield from table(("resource", "busy", "hidden", "on the critical path"), rows, {"busy", "hidden"})
