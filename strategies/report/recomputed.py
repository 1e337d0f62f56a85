"""Recomputation as a small table: bytes kept, on the device and on the host, bytes freed and time paid, by each policy
and by the plan. What is paid is what is done again; what waits on the host is paid for where the link is busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strategies.core.plan import NONE, Plan
from strategies.planner.activation_policy import FULL, SELECTIVE, Way, by_policy
from strategies.report.plan_table import human

CHOSEN = "this plan"


def to_json(plan: Plan) -> list[dict[str, Any]]:
    """Bytes that all blocks keep, bytes freed, and what is paid per optimizer step: for each policy and for the plan.

    ``seconds`` is None where nobody knows the machine's rates. Nothing, where nothing is recomputed.
    """
    if not _recomputes(plan):
        return []
    facts = plan.facts
    units = [unit for unit in facts.units if unit.choices is not None]
    ways = {name: [by_policy(unit, name) for unit in units] for name in (NONE, SELECTIVE, FULL)}
    keeps = [plan.keep(unit.name) for unit in units]
    ways[CHOSEN] = [Way(k.policy, k.saved_bytes, 0, k.kept, k.again, k.hosted, k.hosted_bytes) for k in keeps]
    before = sum(unit.saved_bytes for unit in units)
    return [_row(plan, name, before, chosen) for name, chosen in ways.items()]


def _row(plan: Plan, name: str, before: int, ways: list[Way]) -> dict[str, Any]:
    run, rates = plan.facts.run, plan.facts.machine.rates
    kept = sum(way.saved_bytes for way in ways)
    seconds = [rates.seconds(way.again, run.precision) for way in ways] if rates else None
    return {
        "policy": name,
        "blocks": sum(way.policy != NONE for way in ways),
        "kept_bytes": kept,
        "hosted_bytes": sum(way.hosted_bytes for way in ways),
        "freed_bytes": before - kept,
        "flops": run.accumulation * sum(way.again.flops for way in ways),
        "seconds": None if seconds is None else run.accumulation * sum(seconds),
    }


def _recomputes(plan: Plan) -> bool:
    return any(plan.keep(unit.name).recomputes for unit in plan.facts.units)


def lines(plan: Plan) -> Iterator[str]:
    """For people."""
    rows = to_json(plan)
    if not rows:
        return
    rates = plan.facts.machine.rates
    origin = rates.origin if rates else "unknown"
    yield f"recomputation, all blocks on one rank; paid per optimizer step, simulated; rates: {origin}"
    yield (
        f"  {'policy':<10} {'blocks':>6} {'kept':>11} {'on the host':>11} {'freed':>11} {'paid':>10}  "
        f"{'operations again':>17}"
    )
    for row in rows:
        paid = "?" if row["seconds"] is None else f"{1e3 * row['seconds']:,.1f} ms"
        yield (
            f"  {row['policy']:<10} {row['blocks']:>6} {human(row['kept_bytes']):>11} "
            f"{human(row['hosted_bytes']):>11} {human(row['freed_bytes']):>11} "
            f"{paid:>10}  {row['flops'] / 1e9:>13,.1f} GFLO"
        )
