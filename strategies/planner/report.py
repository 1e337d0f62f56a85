"""The plan with its price: what people read before a run, and what machines read after it."""

from __future__ import annotations

from typing import Any

from strategies.core import render
from strategies.core.linears import Gemm
from strategies.core.plan import Plan
from strategies.planner import recomputed, routes, stowage
from strategies.planner.price import Price


def text(plan: Plan, priced: Price | None) -> str:
    """The table, the routes of linear layers, what recomputation frees and costs, the stowage, the simulated step."""
    parts = [routes.lines(plan), recomputed.lines(plan), stowage.lines(plan), priced.lines() if priced else ()]
    shown = [list(part) for part in parts]
    return "\n".join([render.table(plan), *(line for part in shown if part for line in ("", *part))])


def to_json(plan: Plan, priced: Price | None) -> dict[str, Any]:
    """As ``render.to_json``, with ``linears``: routes by path, ``recompute``, ``buckets``, ``simulated``: the price."""
    return {
        **render.to_json(plan),
        "linears": {
            path: {gemm.value: each.of(gemm).value for gemm in Gemm} for path, each in routes.chosen(plan).items()
        },
        "recompute": recomputed.to_json(plan),
        "buckets": stowage.to_json(plan),
        "simulated": priced.to_json() if priced else None,
    }
