"""What a step of a plan will take: the layout as a problem for the simulator. Simulated, and always called so.

Compute times are those that were measured, else floating-point operations over the rate of matrix products; backward
takes twice the forward, and what it does again besides (all of a block under Hugging Face's checkpointing; else as
counted, see ``activation_policy.py``). A unit's part of the operations is its part of the weights that matrix products
read: all but the embedding's, and a tied table counts for the head. Attention's own products are spread likewise.

An update on the device is bound by its memory: weight, gradient and moments, 7 fp32 numbers per parameter read or
written.

A weight that stays over the end of an iteration still comes up once, if the CPU updates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strategies.core.facts import Facts, Rates, UnitKind
from strategies.core.layout import Bucket, Layout, Site, ticks_of, uses
from strategies.core.plan import Plan
from strategies.planner.problem import Eviction, Link, Problem, Step, Update, Weight, When
from strategies.planner.simulate import Outcome, simulate
from strategies.planner.tasks import Resource, build

STEADY = 2  # the first iteration that is like those after it
TOUCHED_BYTES = 28  # per parameter, by an update: 4 numbers read and 3 written, in fp32


@dataclass(frozen=True, slots=True)
class StepCost:
    """A simulated step. ``compute_seconds`` is what it would take if nothing ever waited and nothing was updated."""

    outcome: Outcome
    compute_seconds: float
    origin: str

    @property
    def seconds(self) -> float:
        return self.outcome.period

    def lines(self) -> Iterator[str]:
        """For people: the step, and the bill: what each resource is busy, what of it compute hides, what binds."""
        out = self.outcome
        yield (
            f"simulated step: {self.seconds:.3g} s, of which forward and backward {self.compute_seconds:.3g} s "
            f"({self.compute_seconds / self.seconds:.0%}); {out.binds.value} binds; rates: {self.origin}"
        )
        yield f"  {'':<9}  {'busy':>8}  {'hidden':>6}  on the longest chain of waits"
        for resource in Resource:
            if out.busy[resource] > 0:
                hidden = "" if resource is Resource.COMPUTE else f"{out.hidden[resource] / out.busy[resource]:.0%}"
                chain = f"{out.critical[resource]:.3g} s ({out.critical[resource] / self.seconds:.0%})"
                yield f"  {resource.value:<9}  {out.busy[resource]:>6.3g} s  {hidden:>6}  {chain}"

    def bill(self) -> str:
        """What is busy beside compute, on one line."""
        out = self.outcome
        parts = [
            f"{resource.value} {out.busy[resource]:.3g} s ({out.hidden[resource] / out.busy[resource]:.0%} hidden)"
            for resource in Resource
            if resource is not Resource.COMPUTE and out.busy[resource] > 0
        ]
        return f"busy beside compute: {', '.join(parts) or 'nothing'}"

    def to_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "binds": self.outcome.binds.value,
            "busy_seconds": {resource.value: self.outcome.busy[resource] for resource in Resource},
            "critical_seconds": {resource.value: self.outcome.critical[resource] for resource in Resource},
            "hidden_seconds": {resource.value: self.outcome.hidden[resource] for resource in Resource},
            "rates": self.origin,
        }


def price(plan: Plan) -> StepCost | None:
    """The simulated step of ``plan``; None where nothing is stowed or nobody knows the machine's rates."""
    rates, layout = plan.facts.machine.rates, plan.layout
    if rates is None or layout is None or not plan.facts.run.forward_flops:
        return None
    return cost_of(plan.facts_as_kept(), layout, rates)


def cost_of(facts: Facts, layout: Layout, rates: Rates) -> StepCost:
    """The simulated step of ``layout``."""
    problem = problem_of(facts, layout, rates)
    outcome = simulate(problem, list(evictions_of(problem, layout)))
    origin = rates.origin if facts.unit_times is None else f"{rates.origin}; blocks: {facts.unit_times.origin}"
    return StepCost(outcome, problem.compute_seconds * layout.accumulation, origin)


def alone(facts: Facts, rates: Rates) -> float:
    """Simulated seconds of a step that moves nothing but what is saved on the host, without its update."""
    return cost_of(facts, empty(facts), rates).seconds


def empty(facts: Facts) -> Layout:
    """The layout of a run that stows nothing."""
    names = tuple(unit.name for unit in facts.units)
    return Layout(buckets=(), units=names, in_backward=False, accumulation=facts.run.accumulation, max_grad_norm=0.0)


def traffic(facts: Facts, layout: Layout, rates: Rates) -> tuple[int, int]:
    """Bytes that cross the link in one step, up and down."""
    problem = problem_of(facts, layout, rates)
    tasks = [task for task in build(problem, list(evictions_of(problem, layout)), 4) if task.iteration == STEADY]
    up, down = (sum(task.num_bytes for task in tasks if task.resource is lane) for lane in (Resource.UP, Resource.DOWN))
    return up, down


def problem_of(facts: Facts, layout: Layout, rates: Rates) -> Problem:
    """Steps, items and link of ``layout``. Memory is not part of it: the layout fits, or it would not be one."""
    names = [unit.name for unit in facts.units]
    forward, backward = zip(*unit_seconds(facts, rates), strict=True)
    steps_by_unit = ticks_of(names)
    steps = [
        Step(f"forward {unit.name}", seconds, 0, unit.hosted_bytes)
        for unit, seconds in zip(facts.units, forward, strict=True)
    ]
    steps += [Step(f"backward {names[i]}", backward[i], 0) for i in reversed(range(len(names)))]
    return Problem(
        steps=tuple(steps),
        items=tuple(_item(bucket, layout, facts, rates, steps_by_unit) for bucket in layout.buckets),
        link=Link(rates.link_latency_s, rates.up_bytes_per_s, rates.down_bytes_per_s, rates.duplex_factor),
        budget=1 << 62,
        accumulation=layout.accumulation,
        when=When.BACKWARD if layout.in_backward else When.FORWARD,
        grad_slots=layout.grad_slots,
        visit_slots=layout.visit_slots,
    )


def unit_seconds(facts: Facts, rates: Rates) -> list[tuple[float, float]]:
    """Forward and backward of one micro-batch by unit, in order: as measured, else from operations."""
    found = []
    for unit, flops in zip(facts.units, unit_flops(facts), strict=True):
        once = flops / rates.gemm_flops(facts.run.precision)
        forward, backward = facts.unit_times.of(unit.kind) if facts.unit_times else (once, 2 * once)
        whole = forward if facts.run.recomputes and unit.kind is UnitKind.BLOCK else 0.0
        found.append((forward, backward + whole + rates.seconds(unit.again, facts.run.precision)))
    return found


def unit_flops(facts: Facts) -> list[float]:
    """Forward operations of one micro-batch by unit, in order."""
    reads = {unit.name: unit.num_params * (unit.kind is not UnitKind.EMBEDDING) for unit in facts.units}
    for param in facts.params:
        for user in param.users:
            reads[user] += param.num_elements
    total = sum(reads.values())
    return [facts.run.forward_flops * reads[unit.name] / total if total else 0.0 for unit in facts.units]


def _item(bucket: Bucket, layout: Layout, facts: Facts, rates: Rates, steps: dict[str, tuple[int, int]]) -> Weight:
    return Weight(bucket.name, bucket.weight_bytes, uses(bucket, steps), _update(bucket, layout, facts, rates))


def _update(bucket: Bucket, layout: Layout, facts: Facts, rates: Rates) -> Update | None:
    if bucket.site is Site.NONE:
        return None
    elements = sum(bucket.sizes)
    seconds = elements * TOUCHED_BYTES / rates.device_bytes_per_s
    if bucket.site is Site.HOST:
        seconds = elements / rates.update_params_per_s(facts.run.precision)
    state = 4 * (layout.moments + bucket.mixed) * bucket.num_elements if bucket.site is Site.STREAMED else 0
    return Update(
        site=bucket.site,
        seconds=seconds,
        grad_bytes=bucket.weight_bytes,
        state_bytes=state,
        grad_home=bucket.grad_home,
    )


def evictions_of(problem: Problem, layout: Layout) -> Iterator[Eviction]:
    """The gaps in which the layout's weights are away, and the steps at which they come back."""
    count = len(problem.steps)
    for gap in problem.gaps:
        stays = layout.buckets[gap.item].resident_ticks
        here = {step for start, end in stays for step in range(start, end)}
        if stays and (gap.after + 1) % count not in here:
            issue = next(step for step in range(gap.after + 1, gap.before + 1) if step % count in here)
            yield Eviction(gap, issue)
