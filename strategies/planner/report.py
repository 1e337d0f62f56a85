"""The plan with its price: what people read before a run, and what machines read after it."""

from __future__ import annotations

from typing import Any

from strategies.core import render
from strategies.core.plan import Plan
from strategies.planner.price import price


def text(plan: Plan) -> str:
    """The table, and the simulated step where the machine's rates are known."""
    priced = price(plan)
    return "\n".join([render.table(plan), *(priced.lines() if priced else ())])


def to_json(plan: Plan) -> dict[str, Any]:
    """As ``render.to_json``, with ``simulated``: the price, or None."""
    priced = price(plan)
    return {**render.to_json(plan), "simulated": priced.to_json() if priced else None}
