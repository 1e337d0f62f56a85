"""The plan with its price: what people read before a run, and what machines read after it."""

from __future__ import annotations

from typing import Any

from strategies.core.linears import Gemm
from strategies.core.plan import Plan
from strategies.planner import gemm_routes
from strategies.planner.step_cost import StepCost
from strategies.report import plan_table, recomputed, stowage


def text(plan: Plan, priced: StepCost | None) -> str:
    """The table, the routes of linear layers, what recomputation frees and costs, the stowage, the simulated step."""
    parts = [gemm_routes.lines(plan), recomputed.lines(plan), stowage.lines(plan), priced.lines() if priced else ()]
    shown = [list(part) for part in parts]
    return "\n".join([plan_table.table(plan), *(line for part in shown if part for line in ("", *part))])


def to_json(plan: Plan, priced: StepCost | None) -> dict[str, Any]:
    """As ``render.to_json``, with ``linears``: routes by path, ``recompute``, ``buckets``, ``simulated``: the price."""
    return {
        **plan_table.to_json(plan),
        "linears": {
            path: {gemm.value: each.of(gemm).value for gemm in Gemm} for path, each in gemm_routes.chosen(plan).items()
        },
        "recompute": recomputed.to_json(plan),
        "buckets": stowage.to_json(plan),
        "simulated": priced.to_json() if priced else None,
    }
