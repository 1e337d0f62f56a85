"""The plan as a table: what is needed and what the machine has, then one row for the embedding, all blocks and the head
per tier, which says who decided it and why; and every answer about one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deepstow.strategies.core.facts import Unit, UnitKind
from deepstow.strategies.core.grid import Cell, Grid
from deepstow.strategies.core.layout import Addresses, Bucket, Item, Layout, Site, largest_shared, leads, ticks_of, uses
from deepstow.strategies.core.plan import CHUNKS, INPUT, NONE, Impl, Keep, Kind, Plan, Tier, When
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.budget import loading_bytes, writing_bytes
from deepstow.strategies.planner.lossy import ROWS, words
from deepstow.strategies.planner.memory_rows import UPDATES
from deepstow.strategies.planner.network import crosses, leaving, sum_bound
from deepstow.strategies.planner.overlap import UNDER_WAY
from deepstow.strategies.report.table import table as aligned

BUCKETS = ("buckets", "bytes", "update", "gradients wait", "weights", "address on the device")
HEADER = ("unit", "tier", "each rank", *(kind.value for kind in Kind), "decided by", "why")
EXPLAINED = ("what", "where", "each rank", "bytes", "decided by", "why")
IN_RAM = {Tier.DEVICE: "this machine's RAM", Tier.HOST: "the same RAM"}  # without an accelerator
SAVED = "saved for backward"
SHOWN = 8  # copies and stages side by side; of more, the first ones


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors of a unit on one rank, or a buffer."""

    unit: str
    tensors: str
    shards: int
    num_bytes: int
    tier: Tier
    decided_by: str
    reason: str


def rows(plan: Plan) -> list[Row]:
    """All rows in order of first use, without tensors that do not exist."""
    all_rows = [row for unit in plan.facts.units for row in rows_of(plan, unit)]
    for reserve in (reserve for tier in Tier for reserve in plan.reserves(tier) if reserve.num_bytes):
        tensors, by = f"buffer, {reserve.when.value}", plan.decided_by(reserve.slot)
        all_rows.append(Row(reserve.owner, tensors, 1, reserve.num_bytes, reserve.tier, by, reserve.reason))
    return all_rows


def rows_of(plan: Plan, unit: Unit) -> list[Row]:
    """Of one unit: at the tier of its tensors, then at that of strays; then what it saves."""
    name, all_rows = unit.name, list[Row]()
    for kind in Kind:
        share = plan.share(name, kind)
        by = plan.decided_by(share.slot)
        for tier in sorted(Tier, key=lambda tier: tier is not share.tier):
            reason = share.reason if tier is share.tier else share.stray_reason
            all_rows.append(Row(name, kind.value, share.shards, plan.num_bytes(name, kind, tier), tier, by, reason))
    keep = plan.keep(name)
    for tier, num_bytes in ((Tier.DEVICE, keep.saved_bytes), (Tier.HOST, keep.hosted_bytes)):
        all_rows.append(Row(name, SAVED, 1, num_bytes, tier, plan.decided_by(keep.slot), keep.reason))
    return [row for row in all_rows if row.num_bytes]


def table(plan: Plan) -> str:
    """The whole plan as text."""
    return "\n".join([title(plan), *summary(plan), "", *lines(plan)])


def title(plan: Plan) -> str:
    """Model, precision, ranks, machine and tokens on one line."""
    run, machine = plan.facts.run, plan.facts.machine
    of_model = f" on each rank, of {run.model_params / 1e6:,.1f} M" if run.model_params else ""
    computes = f" (autocast to {run.autocast.value})" if run.autocast else ""
    return (
        f"plan: {plan.facts.num_params / 1e6:,.1f} M parameters{of_model}, "
        f"{plan.facts.num_trainable / 1e6:,.1f} M trainable, "
        f"{run.precision.value}{computes}, {run.grid.words} on {machine.name}, "
        f"{run.tokens_per_step:,} tokens per optimizer step"
    )


def lines(plan: Plan) -> list[str]:
    """The table of the training state, and below it saved tensors, buffers and idle strategies."""
    folded: dict[tuple[UnitKind, str, int, str], list[Row]] = {}
    saved: dict[Tier, dict[UnitKind, list[Row]]] = {}
    for unit in plan.facts.units:
        for row in rows_of(plan, unit):
            if row.tensors == SAVED:
                saved.setdefault(row.tier, {}).setdefault(unit.kind, []).append(row)
            else:
                folded.setdefault((unit.kind, row.tier.value, row.shards, row.decided_by), []).append(row)
    kinds = list(UnitKind)
    order = sorted(folded, key=lambda key: (kinds.index(key[0]), key[1]))
    table_lines = aligned(HEADER, (_cells(folded[key]) for key in order), {kind.value for kind in Kind})
    table_lines += [_saved_line(plan, tier, saved[tier]) for tier in Tier if tier in saved]
    table_lines += order_of(plan)
    table_lines += _buffer_lines(plan)
    return table_lines + [f"idle: strategies.{name}: {reason}" for name, reason in plan.idle.items()]


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """One row of the table for rows of units that are alike, at one tier and split in one way."""
    sums = {kind.value: sum(row.num_bytes for row in rows if row.tensors == kind.value) for kind in Kind}
    share = "all" if rows[0].shards == 1 else f"1/{rows[0].shards}"
    why = "; ".join(dict.fromkeys(row.reason for row in rows))
    sizes = (human(size) if size else "" for size in sums.values())
    return (_span([row.unit for row in rows]), rows[0].tier.value, share, *sizes, rows[0].decided_by, why)


def _span(units: Iterable[str]) -> str:
    """``layers.0``, or ``layers.0..31 x32`` for several."""
    names = list(dict.fromkeys(units))
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]} x{len(names)}"


def order_of(plan: Plan) -> list[str]:
    """The order of a step's micro-batches, if it is not one after the other."""
    run = plan.facts.run
    tied = "; gradients of the tied head are added in another order than plain training's" if run.tied else ""
    order = f"all {run.layerwise} micro-batches of a step pass a layer before the next{tied}"
    return [order] if run.layerwise > 1 else []


def _saved_line(plan: Plan, tier: Tier, saved: dict[UnitKind, list[Row]]) -> str:
    def total(rows: Iterable[Row]) -> str:
        return human(sum(row.num_bytes for row in rows))

    every = [row for of_kind in saved.values() for row in of_kind]
    parts = ", ".join(f"{_span(row.unit for row in of_kind)} {total(of_kind)}" for of_kind in saved.values())
    why = "; ".join(f"{by}: {reason}" for by, reason in dict.fromkeys((row.decided_by, row.reason) for row in every))
    times = plan.facts.run.in_flight * plan.facts.run.layerwise
    per_batch = f", for each of {times} micro-batches under way" if times > 1 else ""
    return f"{SAVED} on the {tier.value}{per_batch}: {total(every)} ({parts}) [{why}]"


def _buffer_lines(plan: Plan) -> Iterator[str]:
    """Reserved buffers, by tier and by when they are alive."""
    for tier in Tier:
        for when in When:
            alive = [r for r in plan.reserves(tier) if r.when is when and r.num_bytes]
            if alive:
                parts = ", ".join(f"{r.owner.removeprefix(f'{tier.value}: ')} {human(r.num_bytes)}" for r in alive)
                yield f"buffers on the {tier.value}, {when.value}: {parts}"


def tiers_of(plan: Plan) -> list[Tier]:
    """Those that have a line of their own: without an accelerator the device is the host, and its line covers both."""
    used = plan.facts.machine.has_accelerator or plan.states(Tier.HOST) or plan.hosted_bytes()
    return list(Tier) if used else [Tier.DEVICE]


def summary(plan: Plan) -> Iterator[str]:
    """Predicted peak and room per tier of one rank."""
    machine = plan.facts.machine
    capacity = {Tier.DEVICE: machine.device_bytes, Tier.HOST: machine.host_bytes}
    for tier in tiers_of(plan):
        peak = plan.peak(tier)
        room = capacity[tier] - peak
        spare = f"{human(room)} free" if room >= 0 else f"{human(-room)} too much"
        if tier is Tier.DEVICE and machine.device_overhead_bytes:
            spare += f", beside {human(machine.device_overhead_bytes)} for its context and libraries"
        where = tier.value if machine.has_accelerator else f"{tier.value} ({IN_RAM[tier]})"
        yield (
            f"predicted peak per rank, {where}: {human(peak)} of {human(capacity[tier])} ({spare}); "
            f"training state {human(plan.states(tier))}"
        )
    run = plan.facts.run
    yield from _whole_experts(plan)
    if run.evaluation_rows and run.evaluation_bytes > plan.saved_peak():
        yield f"an evaluation of {run.evaluation_rows} rows takes the most: {human(run.evaluation_bytes)} at once"
    if (loading := loading_bytes(plan)) > plan.peak(Tier.HOST):
        yield f"while the model is loaded, per rank, host: up to {human(loading)}"
    if writing := writing_bytes(plan):
        yield f"while the model is written, first rank, host: up to {human(writing)}"
    if plan.facts.run.two_level:
        yield from (reserve.reason for reserve in plan.reserves(Tier.DEVICE) if reserve.owner.startswith("collectives"))
    yield from (reserve.reason for reserve in plan.reserves(Tier.DEVICE) if reserve.owner in (UNDER_WAY, ROWS))
    if plan.facts.run.compression is not None:
        yield words(
            plan.facts, spans=plan.layout is not None and any(bucket.shards > 1 for bucket in plan.layout.buckets)
        )


def _whole_experts(plan: Plan) -> Iterator[str]:
    """That experts which are one tensor stay as they are beside quantised linear layers."""
    blocks = [unit for unit in plan.facts.units if unit.kind is UnitKind.BLOCK]
    packed = sum(unit.quantised for unit in blocks)
    unpacked = sum(unit.num_params - unit.num_trainable for unit in blocks) - packed
    if plan.facts.run.num_experts and 0 < packed < unpacked:
        size = human(unpacked * plan.facts.run.frozen_bytes)
        yield f"fused experts are not quantised: {size} stay as they are, since bitsandbytes packs linear layers alone"


# --- one unit ---------------------------------------------------------------------------------------------------------


def explained(plan: Plan, name: str) -> Iterator[str]:
    """A table of the tensors of the unit called ``name``, and below it what forward and backward do."""
    unit = plan.facts.unit(name)
    yield f"{name}: {unit.num_params:,} parameters, {unit.num_trainable:,} of them trained"
    rows = rows_of(plan, unit)
    cells = [
        (row.tensors, row.tier.value, "all" if row.shards == 1 else f"1/{row.shards}", human(row.num_bytes),
         row.decided_by, row.reason)
        for row in rows
    ]  # fmt: skip
    yield from aligned(EXPLAINED, cells, {"bytes"})
    keep, by = next((keep, by) for keep, by in plan.answers.values() if isinstance(keep, Keep) and keep.unit == name)
    yield f"backward: {_backward(keep)} [{by}: {keep.reason}]"
    impl, by = next((impl, by) for impl, by in plan.answers.values() if isinstance(impl, Impl) and impl.unit == name)
    yield f"computed: {impl.implementation} [{by}: {impl.reason}]"
    yield from _moved(plan, name)
    yield from _launched(unit)


def _backward(keep: Keep) -> str:
    if keep.policy == NONE:
        return "uses all that forward saved"
    if keep.policy == CHUNKS:
        return "computes the softmax of the logits again, by chunks"
    kept = ["the input", *(name for name in keep.kept if name != INPUT)]
    waits = f"; on the host meanwhile: {', '.join(keep.hosted)}" if keep.hosted else ""
    return f"runs forward again; kept: {', '.join(kept)}{waits}"


def _moved(plan: Plan, name: str) -> Iterator[str]:
    """The buckets in which its weights are copied and updated."""
    buckets = [bucket for bucket in plan.layout.buckets if name in bucket.units] if plan.layout is not None else []
    if buckets:
        come = sum(not bucket.resident for bucket in buckets)
        yield f"buckets: {', '.join(bucket.name for bucket in buckets)}; the weights of {come} come for each use"


def _launched(unit: Unit) -> Iterator[str]:
    """How many operators of it a device is given one by one, if they were counted."""
    if unit.launches:
        backward = unit.launches_back or "not counted"
        yield f"operators of a micro-batch that are launched one by one: forward {unit.launches}, backward {backward}"


# --- buckets ---------------------------------------------------------------------------------------------------------


def bucket_lines(plan: Plan) -> list[str]:
    """Which buckets are updated where, when their weights travel, and their addresses; empty if nothing is stowed. All
    of one kind share a row, wherever they stand; ``plan.json`` lists each of them.
    """
    layout, addresses = plan.layout, plan.addresses
    if layout is None or addresses is None:
        return []
    kinds = {unit.name: unit.kind for unit in plan.facts.units}
    groups: dict[tuple[object, ...], list[Bucket]] = {}
    for bucket in layout.buckets:
        # Embedding, blocks and head each have rows of their own; a bucket of several units is of the first one's kind.
        grads = (bucket.grad_tier, bucket.grad_split, bucket.grad_direct, bucket.grad_taken)
        key = (bucket.site, grads, bucket.resident, bucket.weight_on_disk, bucket.frozen_as, kinds[bucket.units[0]])
        groups.setdefault(key, []).append(bucket)
    return [
        *aligned(BUCKETS, (_bucket_cells(group, layout, addresses) for group in groups.values())),
        *_sums(plan, layout),
    ]


def _sums(plan: Plan, layout: Layout) -> Iterator[str]:
    """How ranks add gradients, what that changes in a sum, and its bytes; ``summary`` has said it of others."""
    fast, shared = layout.reduction == "fast", [bucket for bucket in layout.buckets if bucket.shards > 1]
    size = human(largest_shared(layout))
    if not shared:
        if fast:
            yield "reduction: fast has no effect, since no ranks share a gradient"
        return
    if plan.facts.run.compression is not None:
        return
    ranks, dtype = shared[0].shards, shared[0].dtype
    order = "machine by machine" if plan.facts.run.two_level else "in the order of ranks"
    words = f"exact, {order}; {size} of the device receive them"
    if fast:
        bound = f"at most {sum_bound(ranks, dtype):.2g} of the sizes of its parts ({dtype})"
        words = f"fast, on their way, which saves {size} of the device; a sum differs from the exact one by "
        words += bound if ranks > 2 else "nothing, since two numbers have one sum"
    if crosses(plan.facts):
        chosen, other = (leaving(plan.facts, how) for how in (("fast", "exact") if fast else ("exact", "fast")))
        words += f"; {chosen:.0%} of each go to other machines ({'exact' if fast else 'fast'}: {other:.0%})"
        if plan.facts.machine.rates and not plan.facts.machine.rates.net_across_bytes_per_s:
            words += ", how fast is unknown here: simulated as if all were on one"
    yield f"gradients of {ranks} ranks are added: {words}"


def _bucket_cells(buckets: Sequence[Bucket], layout: Layout, addresses: Addresses) -> tuple[str, ...]:
    first, last = buckets[0], buckets[-1]
    name = first.name if len(buckets) == 1 else f"{first.name} to {last.name} ({len(buckets)})"
    spots = [addresses.of(bucket.name, Item.WEIGHT) for bucket in buckets]
    where = f"{human(min(s.offset for s in spots))} to {human(max(s.end for s in spots))}"
    how = ", shared" * first.grad_split + ", without a slot" * first.grad_direct
    at = "the update takes them" if first.grad_taken else f"on the {first.grad_tier.value}"
    waits = "" if first.site is Site.NONE else f"{at}{how}"
    total = human(sum(bucket.weight_bytes for bucket in buckets))
    return (name, total, UPDATES[first.site], waits, _travels(buckets, layout), where)


def _travels(buckets: Sequence[Bucket], layout: Layout) -> str:
    if buckets[0].resident:
        return "stay"
    forward, backward = zip(*(leads(bucket, layout) for bucket in buckets), strict=True)
    ticks, turn = ticks_of(layout.units), layout.num_ticks // 2
    come = (
        "come"
        + " from the disk" * buckets[0].weight_on_disk
        + f" in {buckets[0].frozen_as}" * bool(buckets[0].frozen_as)
    )
    if all(uses(bucket, ticks)[-1] < turn for bucket in buckets):
        return f"{come} {_numbers(forward)} ticks ahead in forward"
    return f"{come} {_numbers(forward)} ticks ahead in forward, {_numbers(backward)} in backward"


def _numbers(numbers: Iterable[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


# --- ranks -----------------------------------------------------------------------------------------------------------


def grid_table(grid: Grid) -> list[str]:
    """Who holds which part of the model, and who talks to whom; no lines if every rank has a whole copy."""
    if grid.is_plain:
        return []
    copies, stages = range(min(grid.replicas, SHOWN)), range(min(grid.stages, SHOWN))
    rows = [(f"stage {stage}", *(_ranks(grid, stage, copy) for copy in copies)) for stage in stages]
    rows += [("...", *("" for _ in copies))] if grid.stages > SHOWN else []
    legend = ["ranks joined by = exchange in every layer"] if grid.tensor * grid.slices > 1 else []
    legend += ["stages send hidden states on, and gradients back"] if grid.stages > 1 else []
    legend += ["ranks of a row add up gradients once per step"] if grid.replicas * grid.slices > 1 else []
    note = f", of which {SHOWN} copies are shown" if grid.replicas > SHOWN else ""
    return [f"ranks: {grid}{note}", *aligned(("", *(f"data {copy}" for copy in copies)), rows), "; ".join(legend)]


def _ranks(grid: Grid, stage: int, copy: int) -> str:
    ranks = [
        str(grid.rank(Cell(stage, copy, part, tokens))) for tokens in range(grid.slices) for part in range(grid.tensor)
    ]
    return " = ".join(ranks if len(ranks) <= SHOWN // 2 else [ranks[0], ranks[1], "..", ranks[-1]])


def stage_table(plans: Sequence[Plan]) -> list[str]:
    """What each stage holds, by the ``plans`` of the stages in order; none for a single one."""
    if len(plans) < 2:
        return []
    header = ("stage", "units", "parameters", "training state", "saved", "peak", "of")
    rows = []
    for number, plan in enumerate(plans):
        facts = plan.facts
        assert facts.cut is not None
        parts = [facts.cut.parts[part] for part in facts.cut.of_stage(number)]
        units = ", ".join(part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)
        saved = facts.run.in_flight * sum(plan.saved_bytes(unit.name) for unit in facts.units)
        sizes = (plan.states(Tier.DEVICE), saved, plan.peak(Tier.DEVICE), facts.machine.device_bytes)
        rows.append((str(number), units, f"{facts.num_params / 1e6:,.1f} M", *map(human, sizes)))
    return ["each rank of a stage, on its device:", *aligned(header, rows, header[2:])]
