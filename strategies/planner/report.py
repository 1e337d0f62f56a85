"""The plan with its price: what people read before a run, and what machines read after it."""

from __future__ import annotations

from typing import Any

from strategies.core import render
from strategies.core.plan import Plan
from strategies.planner import stowage
from strategies.planner.price import Price


def text(plan: Plan, priced: Price | None) -> str:
    """The table, the stowage, and the simulated step where there is one."""
    stowed = list(stowage.lines(plan))
    return "\n".join(
        [render.table(plan), *(["", *stowed] if stowed else ()), *(["", *priced.lines()] if priced else ())]
    )


def to_json(plan: Plan, priced: Price | None) -> dict[str, Any]:
    """As ``render.to_json``, with ``buckets``: the stowage, and ``simulated``: the price, or None."""
    simulated = priced.to_json() if priced else None
    return {**render.to_json(plan), "buckets": stowage.to_json(plan), "simulated": simulated}
