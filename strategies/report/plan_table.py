"""The plan as a table for people and as JSON for machines.

One row per unit and kind of tensor; consecutive blocks with equal answers share a row. Every row says who decided it
and why; the totals below compare what is needed with what the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

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
    num_bytes: Annotated[int, Field(serialization_alias="bytes")]
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
    found = [row for group in groups for kind in Kind for row in _state_rows(plan, group, kind)]
    found += [_saved_row(plan, group, home) for group in groups for home in Home]
    for reserve in (reserve for home in Home for reserve in plan.reserves(home)):
        what, by = f"buffer, {reserve.when.value}", plan.decided_by(reserve.slot)
        found.append(Row(reserve.owner, 1, what, 1, reserve.num_bytes, reserve.home, by, reserve.reason))
    return [row for row in found if row.num_bytes]


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


def _state_rows(plan: Plan, group: list[Unit], kind: Kind) -> Iterator[Row]:
    """At the home of the units' tensors, then at that of strays."""
    name = group[0].name
    share, rest = plan.share(name, kind), plan.rest(name, kind)
    by = plan.decided_by(share.slot, rest.slot)
    for home in sorted(Home, key=lambda home: home is not rest.home):
        num_bytes = sum(plan.num_bytes(unit.name, kind, home) for unit in group)
        reason = share.reason if home is rest.home else rest.reason
        yield Row(name, len(group), kind.value, share.ways, num_bytes, home, by, reason)


def _saved_row(plan: Plan, group: list[Unit], home: Home) -> Row:
    keeps = [plan.keep(unit.name) for unit in group]
    num_bytes = sum(keep.saved_bytes if home is Home.DEVICE else keep.hosted_bytes for keep in keeps)
    by = plan.decided_by(keeps[0].slot)
    return Row(group[0].name, len(group), "saved for backward", 1, num_bytes, home, by, keeps[0].reason)


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
        "rows": TypeAdapter(list[Row]).dump_python(rows(plan), mode="json", by_alias=True),
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
