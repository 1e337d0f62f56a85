"""The plan as a table for people and as JSON for machines.

One row per unit and kind of tensor; consecutive blocks with equal answers share a row. Every row says who decided it
and why; the totals below compare what is needed with what the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from strategies.core.facts import Unit
from strategies.core.plan import Decision, Home, Keep, Kind, Plan, Travel, answer
from strategies.core.sizes import human
from strategies.report.table import table as aligned

HEADER = ("unit", "tensors", "each rank", "bytes", "home", "decided by", "why")
IN_RAM = {Home.DEVICE: "this machine's RAM", Home.HOST: "the same RAM"}  # without an accelerator


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``count`` units alike, ``num_bytes`` of them together on one rank."""

    unit: str
    count: int
    tensors: str
    ways: int
    num_bytes: int
    home: Home
    decided_by: str
    reason: str

    def cells(self) -> tuple[str, ...]:
        unit = self.unit if self.count == 1 else f"{self.unit} x{self.count}"
        part = "all" if self.ways == 1 else f"1/{self.ways}"
        return (unit, self.tensors, part, human(self.num_bytes), self.home.value, self.decided_by, self.reason)


def rows(plan: Plan) -> list[Row]:
    """All rows in order of first use, without tensors that do not exist."""
    groups = _alike(plan)
    found = [
        row
        for group in groups
        for kind in Kind
        for home in _homes(plan, group[0], kind)
        if (row := _state_row(plan, group, kind, home)) is not None
    ]
    found += [row for group in groups for home in Home if (row := _saved_row(plan, group, home)) is not None]
    for home in Home:
        for reserve in plan.reserves(home):
            by = plan.decided_by(reserve.slot)
            found.append(
                Row(reserve.owner, 1, f"buffer, {reserve.when.value}", 1, reserve.num_bytes, home, by, reserve.reason)
            )
    return found


def _alike(plan: Plan) -> list[list[Unit]]:
    """Runs of consecutive units whose sizes and answers are equal."""

    def signature(unit: Unit) -> tuple[object, ...]:
        # How far ahead a unit is fetched differs from block to block and is not in this table.
        decisions = [d for d, _ in plan.answers.values() if d.unit == unit.name and not isinstance(d, Travel)]
        return (unit.kind, unit.num_params, unit.num_trainable, *map(_said, decisions))

    groups: list[list[Unit]] = []
    for unit in plan.facts.units:
        if groups and _close(groups[-1][0], unit) and signature(groups[-1][0]) == signature(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _close(first: Unit, other: Unit) -> bool:
    # The first block saves its input in addition to what all save; that alone is no reason for a row of its own.
    return abs(first.saved_bytes - other.saved_bytes) <= max(first.saved_bytes, other.saved_bytes) // 50


def _said(decision: Decision) -> tuple[object, ...]:
    return answer(replace(decision, saved_bytes=0) if isinstance(decision, Keep) else decision), decision.reason


def _homes(plan: Plan, unit: Unit, kind: Kind) -> list[Home]:
    """The home of the unit's tensors, then that of strays."""
    return sorted(Home, key=lambda home: home is not plan.home(unit.name, kind))


def _state_row(plan: Plan, group: list[Unit], kind: Kind, home: Home) -> Row | None:
    first = group[0]
    share = plan.share(first.name, kind)
    num_bytes = sum(plan.num_bytes(unit.name, kind, home) for unit in group)
    if num_bytes == 0:
        return None
    by = plan.decided_by(("Share", first.name, kind.name), ("Rest", first.name, kind.name))
    rest = plan.rest(first.name, kind)
    reason = share.reason if home is rest.home else rest.reason
    return Row(first.name, len(group), kind.value, share.ways, num_bytes, home, by, reason)


def _saved_row(plan: Plan, group: list[Unit], home: Home) -> Row | None:
    first = group[0]
    keeps = [plan.keep(unit.name) for unit in group]
    num_bytes = sum(keep.saved_bytes if home is Home.DEVICE else keep.hosted_bytes for keep in keeps)
    by = plan.decided_by(keeps[0].slot)
    if num_bytes == 0:
        return None
    return Row(first.name, len(group), "saved for backward", 1, num_bytes, home, by, keeps[0].reason)


def table(plan: Plan) -> str:
    """The whole plan as text."""
    run, machine = plan.facts.run, plan.facts.machine
    title = (
        f"plan: {plan.facts.num_params / 1e6:,.1f} M parameters, {plan.facts.num_trainable / 1e6:,.1f} M trainable, "
        f"{run.precision.value}, {run.world_size} rank{'s' * (run.world_size > 1)} on {machine.name}, "
        f"{run.tokens_per_step:,} tokens per optimizer step"
    )
    lines = aligned(HEADER, (row.cells() for row in rows(plan)), {"bytes"})
    idle = [f"idle: strategies.{name}: {reason}" for name, reason in plan.idle.items()]
    return "\n".join([title, "", *lines, "", *summary(plan), *idle])


def summary(plan: Plan) -> Iterator[str]:
    """Predicted peak and room per home of one rank."""
    machine = plan.facts.machine
    has = {Home.DEVICE: machine.device_bytes, Home.HOST: machine.host_bytes}
    for home in Home:
        if home is Home.HOST and not machine.has_accelerator and not plan.states(home) and not plan.hosted_bytes():
            continue  # the device is the host: the line above covers it
        peak = plan.peak(home)
        room = has[home] - peak
        rest = f"{human(room)} free" if room >= 0 else f"{human(-room)} too much"
        where = home.value if machine.has_accelerator else f"{home.value} ({IN_RAM[home]})"
        yield (
            f"predicted peak per rank, {where}: {human(peak)} of {human(has[home])} ({rest}); "
            f"training state {human(plan.states(home))}"
        )


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON types: facts, rows, totals in bytes, DeepSpeed keys, idle strategies."""
    return {
        "facts": plan.facts.to_json(),
        "rows": [
            {
                "unit": row.unit,
                "count": row.count,
                "tensors": row.tensors,
                "ways": row.ways,
                "bytes": row.num_bytes,
                "home": row.home.value,
                "decided_by": row.decided_by,
                "reason": row.reason,
            }
            for row in rows(plan)
        ],
        "totals": {
            home.value: {
                **{kind.value: plan.total(kind, home) for kind in Kind},
                "states": plan.states(home),
                "predicted_peak": plan.peak(home),
            }
            for home in Home
        },
        "deepspeed": plan.engine(),
        "idle": dict(plan.idle),
    }
