"""The plan as a table for people and as JSON for machines.

For people: first what is needed and what the machine has, then one row for the embedding, all blocks and the head per
home; a row says who decided it and why. For machines: one row per unit and kind of tensor, in which consecutive blocks
with equal answers are together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from strategies.core.facts import Unit, UnitKind
from strategies.core.plan import Decision, Home, Keep, Kind, Plan, Travel, When, answer
from strategies.core.sizes import human
from strategies.planner.budget import loading_bytes
from strategies.report.table import table as aligned

HEADER = ("unit", "home", "each rank", *(kind.value for kind in Kind), "decided by", "why")
IN_RAM = {Home.DEVICE: "this machine's RAM", Home.HOST: "the same RAM"}  # without an accelerator


@dataclass(frozen=True, slots=True)
class Row:
    """``count`` units alike, ``num_bytes`` of them together on one rank."""

    unit: str
    count: int
    tensors: str
    ways: int
    num_bytes: Annotated[int, Field(serialization_alias="bytes")]
    home: Home
    decided_by: str
    reason: str


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
    return "\n".join([title(plan), *summary(plan), "", *lines(plan)])


def title(plan: Plan) -> str:
    """Model, precision, ranks, machine and tokens on one line."""
    run, machine = plan.facts.run, plan.facts.machine
    whole = f" on each rank, of {run.model_params / 1e6:,.1f} M" if run.model_params else ""
    return (
        f"plan: {plan.facts.num_params / 1e6:,.1f} M parameters{whole}, "
        f"{plan.facts.num_trainable / 1e6:,.1f} M trainable, "
        f"{run.precision.value}, {run.grid.words} on {machine.name}, "
        f"{run.tokens_per_step:,} tokens per optimizer step"
    )


def lines(plan: Plan) -> list[str]:
    """The table of the training state, and below it saved tensors, buffers and idle strategies."""
    folded: dict[tuple[UnitKind, str, int, str], list[Row]] = {}
    for unit in plan.facts.units:
        for row in (row for kind in Kind for row in _state_rows(plan, [unit], kind) if row.num_bytes):
            folded.setdefault((unit.kind, row.home.value, row.ways, row.decided_by), []).append(row)
    kinds = list(UnitKind)
    order = sorted(folded, key=lambda key: (kinds.index(key[0]), key[1]))
    found = aligned(HEADER, (_cells(folded[key]) for key in order), {kind.value for kind in Kind})
    found += [*_saved_lines(plan), *_buffer_lines(plan)]
    return found + [f"idle: strategies.{name}: {reason}" for name, reason in plan.idle.items()]


def _cells(some: Sequence[Row]) -> tuple[str, ...]:
    """One row of the table for rows of units that are alike, at one home and split in one way."""
    sums = {kind.value: sum(row.num_bytes for row in some if row.tensors == kind.value) for kind in Kind}
    part = "all" if some[0].ways == 1 else f"1/{some[0].ways}"
    why = "; ".join(dict.fromkeys(row.reason for row in some))
    sizes = (human(size) if size else "" for size in sums.values())
    return (_span([row.unit for row in some]), some[0].home.value, part, *sizes, some[0].decided_by, why)


def _span(units: Iterable[str]) -> str:
    """``layers.0``, or ``layers.0..31 x32`` for several."""
    names = list(dict.fromkeys(units))
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]} x{len(names)}"


def _saved_lines(plan: Plan) -> Iterator[str]:
    """What forward saves, by home."""
    for home in Home:
        some = [row for unit in plan.facts.units if (row := _saved_row(plan, [unit], home)).num_bytes]
        if not some:
            continue
        kinds = {unit.name: unit.kind for unit in plan.facts.units}
        parts = []
        for kind in UnitKind:
            of_kind = [row for row in some if kinds[row.unit] is kind]
            if of_kind:
                parts.append(f"{_span(row.unit for row in of_kind)} {human(sum(row.num_bytes for row in of_kind))}")
        why = "; ".join(f"{by}: {reason}" for by, reason in dict.fromkeys((row.decided_by, row.reason) for row in some))
        total = human(sum(row.num_bytes for row in some))
        times = plan.facts.run.in_flight
        each = f", for each of {times} micro-batches under way" if times > 1 else ""
        yield f"saved for backward on the {home.value}{each}: {total} ({', '.join(parts)}) [{why}]"


def _buffer_lines(plan: Plan) -> Iterator[str]:
    """Reserved buffers, by home and by when they are alive."""
    for home in Home:
        for when in When:
            some = [one for one in plan.reserves(home) if one.when is when and one.num_bytes]
            if some:
                parts = ", ".join(f"{one.owner.removeprefix(f'{home.value}: ')} {human(one.num_bytes)}" for one in some)
                yield f"buffers on the {home.value}, {when.value}: {parts}"


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
    if (loading := loading_bytes(plan)) > plan.peak(Home.HOST):
        yield f"while the model is loaded, per rank, host: up to {human(loading)}"


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
