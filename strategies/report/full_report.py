"""The plan with its cost: what people read before a run, and what programs read after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from deepstow.strategies.core.facts import UnitKind
from deepstow.strategies.core.on_disk import (
    bytes_per_s,
    disk_bytes,
    state_file_bytes,
    wear,
    weight_bytes_on_disk,
    weights_on_disk,
    where,
)
from deepstow.strategies.core.plan import NONE, Keep, Kind, Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.activation_policy import FULL, SELECTIVE, KeepOption, by_policy
from deepstow.strategies.planner.step_cost import StepCost, launch_seconds, unit_flops
from deepstow.strategies.planner.tasks import Resource
from deepstow.strategies.report import plan_table
from deepstow.strategies.report.table import table

WORTH = 0.1  # a part of the step that is worth a row
RATED_TB = 600  # written, as drives of 1 TB often are by their makers
POLICIES = ("policy", "blocks", "kept", "on the host", "freed", "paid", "operations again")


def text(
    plan: Plan,
    cost: StepCost | None,
    advice: Sequence[str] = (),
    stages: Sequence[Plan] = (),
    before: Sequence[str] = (),
) -> str:
    """What the run needs, its simulated step, what comes ``before`` and ``advice``; then the grid of ranks, what each
    of the ``stages`` holds, the state, recomputation, buckets, and what is busy in the
    step.
    """
    lines = [plan_table.title(plan), *plan_table.summary(plan), *([headline(plan, cost)] if cost else [])]
    lines += [*launch_lines(plan), *moment_lines(plan), *disk_lines(plan, cost), *before]
    lines += ["what would change it most, estimated:", *advice] if advice else []
    grid = [*plan_table.grid_table(plan.facts.run.grid), *plan_table.stage_table(stages)]
    tables = (plan_table.lines(plan), recompute_lines(plan), plan_table.bucket_lines(plan))
    for section in map(list, (grid, *tables, step_lines(cost) if cost else ())):
        lines += ["", *section] if section else []
    return "\n".join(lines)


def to_json(plan: Plan, cost: StepCost | None) -> dict[str, Any]:
    """The content of ``plan.json``, see ``plan_json.PlanFile``."""
    from deepstow.strategies.report import plan_json  # most plans are printed only, and its classes take time to make

    return {
        **plan_json.to_json(plan),
        "rows": to_jsonable_python(plan_table.rows(plan)),
        "totals": {tier.value: _totals(plan, tier) for tier in Tier},
        "deepspeed": plan.engine(),
        "idle": dict(plan.idle),
        "recompute": recompute_rows(plan),
        "simulated": cost.to_json() if cost else None,
    }


def _totals(plan: Plan, tier: Tier) -> dict[str, int]:
    of_kind = {kind.value: plan.total(kind, tier) for kind in Kind}
    return of_kind | {"states": plan.states(tier), "predicted_peak": plan.peak(tier)}


def headline(plan: Plan, cost: StepCost) -> str:
    """The simulated step on one line; in a pipeline that of one stage."""
    run = plan.facts.run
    step = f"simulated step: {cost.seconds:.3g} s"
    if run.stages > 1:
        waiting = cost.seconds + cost.waits_s(run)
        step = f"simulated step of this stage: {cost.seconds:.3g} s alone, {waiting:.3g} s if all take as long"
    return (
        f"{step}, of which forward and backward {cost.compute_seconds:.3g} s "
        f"({cost.compute_seconds / cost.seconds:.0%}); {cost.outcome.binds.value} binds; rates: {cost.origin}"
    )


def launch_lines(plan: Plan) -> Iterator[str]:
    """That blocks are launched more slowly than they are computed, operator by operator."""
    facts, rates = plan.facts, plan.facts.machine.rates
    if rates is None or facts.unit_times is not None:
        return
    for unit, flops in zip(facts.units, unit_flops(facts), strict=True):
        launched, computed = launch_seconds(facts, unit, rates)[0], flops / rates.gemm_flops(facts.run.computes_in)
        if unit.kind is UnitKind.BLOCK and launched > computed:
            yield (
                f"{unit.launches} operators of {unit.name}: launched in {launched * 1e3:.3g} ms, computed in "
                f"{computed * 1e3:.3g} ms; a larger micro-batch costs little, and training.torch_compile launches fewer"
            )
            return


def moment_lines(plan: Plan) -> Iterator[str]:
    """That training is not exact, and why."""
    if plan.layout is not None and plan.layout.moments_as != "fp32":
        masters = ", masters in bf16" if any(bucket.rounds for bucket in plan.layout.buckets) else ""
        kinds = f"moments in {plan.layout.moments_as}{masters}"
        yield f"not exact: {kinds}, rounded stochastically in each of the CPU's updates"


def disk_lines(plan: Plan, cost: StepCost | None) -> Iterator[str]:
    """What rests on the disk, what a step of all ranks of a machine reads and writes there, and what that wears."""
    layout, rates = plan.layout, plan.facts.machine.rates
    if layout is None or not disk_bytes(layout):
        return
    ranks = plan.facts.machine.ranks or plan.facts.run.world_size
    of, state = f"{ranks} ranks' " if ranks > 1 else "", ranks * len(layout.disk) * state_file_bytes(layout)
    on_disk = [layout.buckets[index] for index in weights_on_disk(layout)]
    frozen, tuned = (
        ranks * sum(weight_bytes_on_disk(b) for b in on_disk if (b.group is None) is is_so) for is_so in (True, False)
    )
    written = state + tuned
    parts = [f"{human(state)} of {of}optimizer state, read and written once per step"] * (state > 0)
    parts += [f"{human(tuned)} of {of}weights, read in forward and in backward and written once per step"] * (tuned > 0)
    parts += [f"{human(frozen)} of {of}frozen weights, read in forward and in backward"] * (frozen > 0)
    line = f"{where(layout.disk)} ({', '.join(layout.disk)}): {'; '.join(parts)}"
    if cost is not None and rates is not None:
        command = f"assumed; deepstow doctor --rates --disk {' '.join(layout.disk)} measures"
        per_hour = written / cost.seconds * 3600 / 1e12
        read, write = (ranks * rate / 1e9 for rate in bytes_per_s(rates, layout.disk))
        if written and wear(layout.disk):
            line += f": {per_hour:.3g} TB written per hour (a drive that is rated for {RATED_TB} TB lasts "
            line += f"{len(layout.disk) * RATED_TB / per_hour / 24:,.0f} days)"
        line += f"; read {read:.3g} GB/s" + f", written {write:.3g}" * (written > 0) + " "
        line += f"by {len(layout.disk)} drives together " if len(layout.disk) > 1 else ""
        line += f"({f'measured on {rates.disk_folder}' if rates.disk_folder else command})"
    yield line


def step_lines(cost: StepCost) -> Iterator[str]:
    """Per resource of the simulated step: how long it is busy, how much of that compute hides, what binds."""
    out = cost.outcome
    rows = []
    for resource in Resource:
        busy, critical = out.busy[resource], out.critical[resource]
        if busy > 0:
            hidden = "" if resource is Resource.COMPUTE else f"{out.hidden[resource] / busy:.0%}"
            share = f"{critical:.3g} s ({critical / cost.seconds:.0%})"
            rows.append((resource.value, f"{busy:.3g} s", hidden, share))
    # What several of them share has no place on the path; it is busy if all together need it for the whole step.
    shared = {name: seconds for name, seconds in out.least.items() if name not in {r.value for r in Resource}}
    rows += [(name, f"{busy:.3g} s", "", "") for name, busy in shared.items() if busy > WORTH * cost.seconds]
    yield from table(("resource", "busy", "hidden", "on the critical path"), rows, {"busy", "hidden"})


def recompute_rows(plan: Plan) -> list[dict[str, Any]]:
    """Bytes kept and freed and what is computed again, of all blocks, per policy and for the plan; empty if nothing is
    recomputed. Costs are per optimizer step; None: the machine's rates are unknown.
    """
    facts = plan.facts
    if not any(plan.keep(unit.name).recomputes for unit in facts.units):
        return []
    units = [unit for unit in facts.units if unit.choices is not None]
    options: dict[str, Sequence[KeepOption | Keep]] = {
        name: [by_policy(unit, name) for unit in units] for name in (NONE, SELECTIVE, FULL)
    }
    options["this plan"] = [plan.keep(unit.name) for unit in units]
    before = sum(unit.saved_bytes for unit in units)
    return [_row(plan, name, before, chosen) for name, chosen in options.items()]


def _row(plan: Plan, name: str, before: int, options: Sequence[KeepOption | Keep]) -> dict[str, Any]:
    run, rates = plan.facts.run, plan.facts.machine.rates
    kept = sum(option.saved_bytes for option in options)
    seconds = [rates.seconds(option.again, run.computes_in) for option in options] if rates else None
    return {
        "policy": name,
        "blocks": sum(option.policy != NONE for option in options),
        "kept_bytes": kept,
        "hosted_bytes": sum(option.hosted_bytes for option in options),
        "freed_bytes": before - kept,
        "flops": run.micro_batches * sum(option.again.flops for option in options),
        "seconds": None if seconds is None else run.micro_batches * sum(seconds),
    }


def recompute_lines(plan: Plan) -> list[str]:
    """The same as text."""
    rates = plan.facts.machine.rates
    rows = [
        (
            row["policy"],
            str(row["blocks"]),
            *(human(row[f"{kind}_bytes"]) for kind in ("kept", "hosted", "freed")),
            "?" if row["seconds"] is None else f"{1e3 * row['seconds']:,.1f} ms",
            f"{row['flops'] / 1e9:,.1f} GFLO",
        )
        for row in recompute_rows(plan)
    ]
    if not rows:
        return []
    origin = rates.origin if rates else "unknown"
    title = f"recomputation, all blocks on one rank; paid per optimizer step, simulated; rates: {origin}"
    return [title, *table(POLICIES, rows, POLICIES[1:])]
