"""The plan with its price: what people read before a run, and what machines read after it."""

from __future__ import annotations

from typing import Any

from strategies.core import render
from strategies.core.linears import Gemm
from strategies.core.plan import Plan
from strategies.planner import routes
from strategies.planner.price import Price


def text(plan: Plan, priced: Price | None) -> str:
    """The table, the routes of linear layers, and the simulated step where there is one."""
    return "\n".join([render.table(plan), *routes.lines(plan), *(priced.lines() if priced else ())])


def to_json(plan: Plan, priced: Price | None) -> dict[str, Any]:
    """As ``render.to_json``, with ``linears``: routes by path, and ``simulated``: the price, or None."""
    taken = {path: {gemm.value: each.of(gemm).value for gemm in Gemm} for path, each in routes.chosen(plan).items()}
    return {**render.to_json(plan), "linears": taken, "simulated": priced.to_json() if priced else None}
