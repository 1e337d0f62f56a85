"""Every answer about one unit of the model: what rests where, how it is computed, who decided it and why."""

from __future__ import annotations

from collections.abc import Iterator

from deepstow.strategies.core.facts import Unit
from deepstow.strategies.core.plan import CHUNKS, INPUT, NONE, Impl, Keep, Plan
from deepstow.strategies.core.sizes import human
from deepstow.strategies.report.plan_table import rows_of
from deepstow.strategies.report.table import table

HEADER = ("what", "where", "each rank", "bytes", "decided by", "why")


def lines(plan: Plan, name: str) -> Iterator[str]:
    """A table of the tensors of the unit called ``name``, and below it what forward and backward do."""
    unit = plan.facts.unit(name)
    yield f"{name}: {unit.num_params:,} parameters, {unit.num_trainable:,} of them trained"
    rows = rows_of(plan, unit)
    cells = [
        (row.tensors, row.tier.value, "all" if row.shards == 1 else f"1/{row.shards}", human(row.num_bytes),
         row.decided_by, row.reason)
        for row in rows
    ]  # fmt: skip
    yield from table(HEADER, cells, {"bytes"})
    keep, by = next((each, by) for each, by in plan.answers.values() if isinstance(each, Keep) and each.unit == name)
    yield f"backward: {_backward(keep)} [{by}: {keep.reason}]"
    impl, by = next((each, by) for each, by in plan.answers.values() if isinstance(each, Impl) and each.unit == name)
    yield f"computed: {impl.implementation} [{by}: {impl.reason}]"
    yield from _moved(plan, name)
    yield from _launched(unit)


def _backward(keep: Keep) -> str:
    if keep.policy == NONE:
        return "uses all that forward saved"
    if keep.policy == CHUNKS:
        return "computes the softmax of the logits again, by chunks"
    kept = ["the input", *(each for each in keep.kept if each != INPUT)]
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
