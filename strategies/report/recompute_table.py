"""Recomputation as a table: bytes kept and freed, and the time of recomputed work, per policy and for the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.core.plan import NONE, Keep, Plan
from strategies.core.sizes import human
from strategies.planner.activation_policy import FULL, SELECTIVE, KeepOption, by_policy
from strategies.report.table import table

CHOSEN = "this plan"
HEADER = ("policy", "blocks", "kept", "on the host", "freed", "paid", "operations again")


def to_json(plan: Plan) -> list[dict[str, Any]]:
    """Of all blocks, cost per optimizer step; None: the machine's rates are unknown. Empty if nothing is recomputed."""
    facts = plan.facts
    if not any(plan.keep(unit.name).recomputes for unit in facts.units):
        return []
    units = [unit for unit in facts.units if unit.choices is not None]
    options: dict[str, Sequence[KeepOption | Keep]] = {
        name: [by_policy(unit, name) for unit in units] for name in (NONE, SELECTIVE, FULL)
    }
    options[CHOSEN] = [plan.keep(unit.name) for unit in units]
    before = sum(unit.saved_bytes for unit in units)
    return [_row(plan, name, before, chosen) for name, chosen in options.items()]


def _row(plan: Plan, name: str, before: int, options: Sequence[KeepOption | Keep]) -> dict[str, Any]:
    run, rates = plan.facts.run, plan.facts.machine.rates
    kept = sum(option.saved_bytes for option in options)
    seconds = [rates.seconds(option.again, run.precision) for option in options] if rates else None
    return {
        "policy": name,
        "blocks": sum(option.policy != NONE for option in options),
        "kept_bytes": kept,
        "hosted_bytes": sum(option.hosted_bytes for option in options),
        "freed_bytes": before - kept,
        "flops": run.accumulation * sum(option.again.flops for option in options),
        "seconds": None if seconds is None else run.accumulation * sum(seconds),
    }


def lines(plan: Plan) -> list[str]:
    """The table as text; empty if nothing is recomputed."""
    rates = plan.facts.machine.rates
    rows = [
        (
            row["policy"],
            str(row["blocks"]),
            *(human(row[f"{what}_bytes"]) for what in ("kept", "hosted", "freed")),
            "?" if row["seconds"] is None else f"{1e3 * row['seconds']:,.1f} ms",
            f"{row['flops'] / 1e9:,.1f} GFLO",
        )
        for row in to_json(plan)
    ]
    if not rows:
        return []
    origin = rates.origin if rates else "unknown"
    title = f"recomputation, all blocks on one rank; paid per optimizer step, simulated; rates: {origin}"
    return [title, *table(HEADER, rows, HEADER[1:])]
