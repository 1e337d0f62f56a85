"""The plan with its price: what people read before a run, and what machines read after it."""

from __future__ import annotations

from typing import Any

from strategies.core import render
from strategies.core.plan import Plan
from strategies.planner import recomputed, stowage
from strategies.planner.price import Price


def text(plan: Plan, priced: Price | None) -> str:
    """The table, what recomputation frees and costs, the stowage, and the simulated step where there is one."""
    parts = [list(recomputed.lines(plan)), list(stowage.lines(plan)), list(priced.lines()) if priced else []]
    return "\n".join([render.table(plan), *(line for part in parts if part for line in ("", *part))])


def to_json(plan: Plan, priced: Price | None) -> dict[str, Any]:
    """As ``render.to_json``, with ``recompute``, ``buckets``: the stowage, and ``simulated``: the price, or None."""
    return {
        **render.to_json(plan),
        "recompute": recomputed.to_json(plan),
        "buckets": stowage.to_json(plan),
        "simulated": priced.to_json() if priced else None,
    }
