"""The cost of a step: a layout as a problem for the simulator. Its seconds are always labelled as simulated.

Compute times are measured ones if there are any, else floating-point operations over the rate of matrix products.
Backward takes twice the forward, less the gradients of frozen weights, plus what it recomputes (all of a block under
Hugging Face's checkpointing; else as counted, see ``activation_policy.py``). A unit's part of the operations is its
part of the weights that matrix products read: all but the embedding's, and a tied table counts for the head.
Attention's own products are distributed likewise. A device that is given operators one by one cannot be faster than
the host launches them, forward's and backward's as counted (of a backward that could not be, twice as many). Nor is it
faster than its memory is read and written by operators without products: norms, rotary embeddings, casts, activations,
counted of a block's forward and twice as much in backward. Quantised weights are unpacked before each product: packed
bytes are read, and weights in the format of compute are written.

An update on the device is bound by its memory: weight, gradient and moments, 7 fp32 numbers per parameter read or
written; or by launching its kernels, a few for each stretch in mixed precision. An update on the host touches 32 bytes
per parameter (``HOST_UPDATE_BYTES``) of a memory that copies use at the same time.

A weight that is resident over the end of an iteration still comes up once if the CPU updates it.

``Estimate`` has the seconds of a placement from the totals of each resource: good enough to rank placements, in
microseconds. With clipping a step has two phases, since no update may begin before the norm is known:

    backward   max(compute, gradients down, weights that come back up)
    forward    max(compute and updates on the device, the CPU's updates, new weights and state up, state down)

and their sum is the estimate; without clipping all of it overlaps. Copies and the CPU's updates share the host's
memory. Waits that come from the order of copies are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from operator import mul
from typing import NamedTuple

from deepstow.strategies.core.facts import HOST_UPDATE_BYTES, NO_WORK, Facts, Rates, RunFacts, Tier, Unit, UnitKind
from deepstow.strategies.core.formats import slower, touched_bytes
from deepstow.strategies.core.layout import (
    ITEM_BYTES,
    SCRATCH_ELEMENTS,
    Bucket,
    Item,
    Layout,
    Site,
    gradient_tick,
    ticks_of,
    uses,
)
from deepstow.strategies.core.on_disk import bytes_per_s, read_bytes, rewritten_bytes
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.planner.activation_policy import FULL, by_policy
from deepstow.strategies.planner.addresses import slot_numbers, weight_packing
from deepstow.strategies.planner.lossy import exchanged_bytes
from deepstow.strategies.planner.network import gather_rate, slices_seconds, sum_seconds, sums_slowdown
from deepstow.strategies.planner.places import OffloadRequest, Place, Placement, Places
from deepstow.strategies.planner.problem import Eviction, Link, Problem, Shared, Tick, Update, Weight
from deepstow.strategies.planner.simulate import Outcome, simulate, simulated_period
from deepstow.strategies.planner.tasks import Resource, build_tasks

# Of runs that others published on H100s: Llama-3 8B on 8 by torchtitan (eager and compiled), MPT 7B on 8 and 70 B on 64
# by MosaicML. Within training a product takes so many times as long as alone, since clocks fall, and it hides nothing
# that only reads and writes memory. Of what ZeRO gathers across machines a part is HIDDEN: by FSDP nearly all, by
# DeepSpeed nearly nothing. So estimated, all of these runs are within NEAR.
WITHIN_TRAINING = 1.4
HIDDEN = 0.5
NEAR = 0.25
STEADY = 2  # the first iteration that is like those after it
TOUCHED_BYTES = 28  # per parameter, by an update on the device: 4 numbers read and 3 written, in fp32
LAUNCHES = 4  # kernels per stretch of an update on the device: gradient to fp32, clipped, applied, weight rounded


@dataclass(frozen=True, slots=True)
class StepCost:
    """A simulated step. ``compute_seconds``: forward and backward without any waiting or updates."""

    outcome: Outcome
    compute_seconds: float
    origin: str

    @property
    def seconds(self) -> float:
        return self.outcome.period

    def waits_s(self, run: RunFacts) -> float:
        """Of a stage of a pipeline, for as many micro-batches as there are other stages (in gpipe and 1f1b)."""
        return (run.stages - 1) / run.accumulation * self.compute_seconds

    def to_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "binds": self.outcome.binds.value,
            "busy_seconds": {resource.value: self.outcome.busy[resource] for resource in Resource},
            "critical_seconds": {resource.value: self.outcome.critical[resource] for resource in Resource},
            "hidden_seconds": {resource.value: self.outcome.hidden[resource] for resource in Resource},
            "least_seconds": dict(self.outcome.least),
            "rates": self.origin,
        }


def plan_cost(plan: Plan) -> StepCost | None:
    """The simulated step of ``plan``; None if nothing is stowed or the machine's rates are unknown."""
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


def seconds_of(facts: Facts, layout: Layout, rates: Rates) -> float:
    """The seconds of ``cost_of``, in less time."""
    problem = problem_of(facts, layout, rates)
    return simulated_period(problem, list(evictions_of(problem, layout)))


def empty(facts: Facts) -> Layout:
    """The layout of a run that stows nothing: its cost has no update, and only saved tensors cross the link."""
    names = tuple(unit.name for unit in facts.units)
    return Layout(buckets=(), units=names, in_backward=False, accumulation=facts.run.accumulation, max_grad_norm=0.0)


def traffic(facts: Facts, layout: Layout, rates: Rates) -> tuple[int, int]:
    """Bytes that cross the link in one step, up and down."""
    problem = problem_of(facts, layout, rates)
    tasks = [task for task in build_tasks(problem, list(evictions_of(problem, layout)), 4) if task.iteration == STEADY]
    up, down = (
        sum(task.num_bytes for task in tasks if task.resource is stream) for stream in (Resource.UP, Resource.DOWN)
    )
    return up, down


def ticks_of_units(facts: Facts, rates: Rates) -> tuple[Tick, ...]:
    """The ticks of one micro-batch: they depend on no layout."""
    forward, backward = zip(*unit_seconds(facts, rates), strict=True)
    ticks = [
        Tick(f"forward {unit.name}", seconds, 0, facts.run.layerwise * unit.hosted_bytes)
        for unit, seconds in zip(facts.units, forward, strict=True)
    ]
    pairs = zip(reversed(facts.units), reversed(backward), strict=True)
    return (*ticks, *(Tick(f"backward {unit.name}", seconds, 0) for unit, seconds in pairs))


def problem_of(
    facts: Facts, layout: Layout, rates: Rates, *, updates: bool = True, ticks: tuple[Tick, ...] | None = None
) -> Problem:
    """Ticks, weights and link of ``layout``, with or without updates and what else depends on addresses. The budget is
    unlimited: a layout fits by construction. ``ticks``: as from ``ticks_of_units``, if they are known.
    """
    in_spans = facts.run.compression is None and any(bucket.shards > 1 for bucket in layout.buckets)
    slots, overlapping = (slot_numbers(layout), _overlapping(layout)) if updates else ({}, {})
    ticks_by_unit = ticks_of([unit.name for unit in facts.units])
    return Problem(
        ticks=ticks or ticks_of_units(facts, rates),
        weights=tuple(
            Weight(
                bucket.name,
                bucket.weight_bytes,
                uses(bucket, ticks_by_unit),
                _update(bucket, layout, facts, rates, slots) if updates else None,
                overlapping.get(index, ()),
                bucket.shards,
                on_host=not bucket.resident,
                gradient_tick=gradient_tick(bucket, ticks_by_unit),
                common_host=layout.common_host and bucket.shards > 1 and not bucket.weight_on_disk,
                copy_bytes=bucket.copy_bytes if bucket.frozen_as else None,
                disk_bytes=read_bytes(bucket),
                disk_slot=slots.get((bucket.name, Item.COPY)) if bucket.weight_on_disk else None,
            )
            for index, bucket in enumerate(layout.buckets)
        ),
        link=Link(rates.link_latency_s, rates.up_bytes_per_s, rates.down_bytes_per_s, rates.duplex_factor),
        budget=1 << 62,
        accumulation=layout.accumulation,
        in_backward=layout.in_backward,
        shared=Shared(
            rates.dram_bytes_per_s,
            rates.device_bytes_per_s,
            cores=not facts.machine.has_accelerator,
            network=gather_rate(facts, rates),
            sums=sums_slowdown(facts, rates, layout.reduction) if in_spans else 1.0,
            through_host=rates.net_bytes_per_s is None,
            disk=bytes_per_s(rates, layout.disk),
            disk_overlap=rates.disk_overlap,
        ),
    )


def _overlapping(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Per travelling bucket, by index: the others that are at some of its addresses at other times."""
    moving = (index for index, bucket in enumerate(layout.buckets) if not bucket.resident)
    spots = sorted(
        (start, start + layout.buckets[index].weight_bytes, index)
        for index, start in zip(moving, weight_packing(layout).offsets, strict=True)
    )
    overlapping: dict[int, list[int]] = {index: [] for *_, index in spots}
    for number, (_, end, index) in enumerate(spots):
        for start, _, other in islice(spots, number + 1, None):
            if start >= end:
                break
            overlapping[index].append(other)
            overlapping[other].append(index)
    return {index: tuple(sorted(others)) for index, others in overlapping.items()}


def unit_seconds(facts: Facts, rates: Rates) -> list[tuple[float, float]]:
    """Forward and backward of one micro-batch, or of all that take turns, by unit, in order: as measured, else from
    operations, and what ranks of a row exchange in attention, and tensor ranks in the memory engine around divided
    layers.
    """
    exchanging, run = slices_seconds(facts, rates), facts.run
    once_summed = sum_seconds(facts, rates) if run.stowed and run.tensor > 1 else 0.0
    forward_sums, backward_sums, repeated = (count * once_summed for count in run.sums)
    times = []
    for unit, flops, saved in zip(facts.units, unit_flops(facts), frozen_flops(facts), strict=True):
        once = flops / rates.gemm_flops(run.computes_in)
        twice = 2 * once - saved / rates.gemm_flops(run.computes_in)
        if unit.kind is UnitKind.BLOCK:
            once, twice = once + exchanging + forward_sums, twice + exchanging + backward_sums
            if once_summed and run.recomputes:
                twice += repeated - forward_sums  # forward is added whole below
            elif once_summed and unit.again == by_policy(unit, FULL).again != NO_WORK:
                twice += repeated
        launched, again = launch_seconds(facts, unit, rates)
        touching, unpacking = _touching_seconds(unit, rates), _unpacking_seconds(facts, unit, rates)
        once = max(once, launched, touching) + unpacking
        twice = max(twice, again, 2 * touching) + unpacking
        forward, backward = facts.unit_times.of(unit.kind) if facts.unit_times else (once, twice)
        forward_again = forward if run.recomputes and unit.kind is UnitKind.BLOCK else 0.0
        repeated_s = rates.seconds(unit.again, run.computes_in) + unpacking * (unit.again.flops > 0)
        times.append((run.layerwise * forward, run.layerwise * (backward + forward_again + repeated_s)))
    return times


def trained_seconds(facts: Facts, rates: Rates) -> list[tuple[float, float]]:
    """``unit_seconds`` as those of published runs; as they are where they were measured, or without an accelerator."""
    if facts.unit_times is not None or not facts.machine.has_accelerator:
        return unit_seconds(facts, rates)
    timed_units = zip(facts.units, unit_seconds(facts, slowed(rates)), strict=True)
    touching = ((times, _touching_seconds(unit, rates)) for unit, times in timed_units)
    return [(forward + seconds, backward + 2 * seconds) for (forward, backward), seconds in touching]


def slowed(rates: Rates) -> Rates:
    """``rates`` with products that are as slow as ``WITHIN_TRAINING``."""
    names = ("gemm_fp32_flops_per_s", "gemm_bf16_flops_per_s", "gemm_fp16_flops_per_s")
    gemm_rates = {name: rate for name in names if (rate := getattr(rates, name))}
    return replace(rates, **{name: rate / WITHIN_TRAINING for name, rate in gemm_rates.items()})


def _touching_seconds(unit: Unit, rates: Rates) -> float:
    """Of the device's memory, for the operators of a block's forward that have no products."""
    if unit.choices is None:
        return 0.0
    works = (*(operator.work for operator in unit.choices.operators), unit.choices.rest)
    return sum(work.touched_bytes for work in works) / rates.device_bytes_per_s


def _unpacking_seconds(facts: Facts, unit: Unit, rates: Rates) -> float:
    """Of the device's memory, to unpack the quantised weights of ``unit`` once."""
    written = facts.run.computes_in.element_bytes * unit.quantised
    return (unit.quantised_bytes + written) / rates.device_bytes_per_s


def launch_seconds(facts: Facts, unit: Unit, rates: Rates) -> tuple[float, float]:
    """Of the host, to launch forward and backward of ``unit`` operator by operator; the CPU computes in the calls
    themselves. What a block repeats of its forward is left out.
    """
    launch_s, backward = rates.launch_s * facts.machine.has_accelerator, unit.launches_back or 2 * unit.launches
    if unit.launches_back and facts.run.recomputes and unit.kind is UnitKind.BLOCK:
        backward -= unit.launches
    return unit.launches * launch_s, backward * launch_s


def unit_flops(facts: Facts) -> list[float]:
    """Forward operations of one micro-batch by unit, in order."""
    reads = _read_weights(facts)
    total = sum(reads)
    return [facts.run.forward_flops * number / total if total else 0.0 for number in reads]


def frozen_flops(facts: Facts) -> list[float]:
    """Operations of one micro-batch's backward that are not needed, by unit: the gradients of frozen weights."""
    frozen, reads = _read_weights(facts, only_frozen=True), _read_weights(facts)
    tokens = facts.run.micro_batch * facts.run.sequence
    # Of experts only some run, so the part of the unit's operations may be less than two per weight and token.
    return [
        min(2 * tokens * number, flops * number / read) if read else 0.0
        for number, read, flops in zip(frozen, reads, unit_flops(facts), strict=True)
    ]


def step_flops(facts: Facts) -> float:
    """Operations of forward and backward of one micro-batch, without recomputation."""
    return 3 * facts.run.forward_flops - sum(frozen_flops(facts))


def _read_weights(facts: Facts, *, only_frozen: bool = False) -> list[int]:
    """Weights that matrix products read, by unit."""
    reads = {
        unit.name: (unit.num_params - only_frozen * unit.num_trainable) * (unit.kind is not UnitKind.EMBEDDING)
        for unit in facts.units
    }
    for param in facts.params:
        for user in param.users:
            reads[user] += param.num_elements * (param.group is None or not only_frozen)
    return list(reads.values())


def device_update(elements: float, rates: Rates, stretches: float = 0) -> float:
    """Seconds of an update on the device of so many ``elements``, in so many launches of its kernels."""
    return max(elements * TOUCHED_BYTES / rates.device_bytes_per_s, LAUNCHES * stretches * rates.launch_s)


def host_update(elements: int, kind: str, facts: Facts, rates: Rates, *, masters: bool) -> tuple[float, int]:
    """Seconds of an update by the CPU, and the bytes that it touches; ``kind``: how moments rest."""
    seconds = elements * slower(kind, masters=masters) / rates.update_params_per_s(facts.run.precision)
    return seconds, elements * touched_bytes(kind, HOST_UPDATE_BYTES, masters=masters)


def _update(
    bucket: Bucket, layout: Layout, facts: Facts, rates: Rates, slots: Mapping[tuple[str, Item], int]
) -> Update | None:
    if bucket.site is Site.NONE:
        return None
    elements = -(-sum(bucket.sizes) // bucket.shards)
    if bucket.site is Site.HOST:
        seconds, touched = host_update(elements, layout.moments_as, facts, rates, masters=bucket.rounds)
    else:
        stretches = -(-elements // SCRATCH_ELEMENTS) if bucket.mixed else 1
        seconds = device_update(elements, rates, max(stretches, len(bucket.params)))
        touched = elements * TOUCHED_BYTES
    state = 4 * (layout.moments + bucket.mixed) * bucket.share if bucket.site is Site.STREAMED else 0
    return Update(
        site=bucket.site,
        seconds=seconds,
        touched_bytes=touched,
        # Without a slot parameters go one by one, and the room between them does not.
        grad_bytes=ITEM_BYTES[bucket.dtype] * elements if bucket.grad_direct else bucket.weight_bytes // bucket.shards,
        state_bytes=state,
        grad_tier=bucket.grad_tier,
        grad_slot=slots.get((bucket.name, Item.GRAD)),
        grad_direct=bucket.grad_direct,
        arrival_slot=slots.get((bucket.name, Item.ARRIVAL)),
        parked_slot=slots.get((bucket.name, Item.PARKED)),
        visit_slot=slots.get((bucket.name, Item.VISIT)),
        disk_bytes=bucket.on_disk * bucket.state_bytes(layout.moments),
        window_slot=slots.get((bucket.name, Item.WINDOW)),
        rewritten_bytes=rewritten_bytes(bucket),
        from_master=bucket.mixed and bucket.site is not Site.HOST,
        exchange_bytes=_sent(bucket, facts, rates),
    )


def _sent(bucket: Bucket, facts: Facts, rates: Rates) -> int:
    """Of its gradients, by one rank: what a ring sends at ``gather_rate``, or in fewer bytes; or spans to their owners,
    and where parameters are cut, sums to the owners of their first elements, for the norm.
    """
    if bucket.shards > 1 and facts.run.compression is None:
        return bucket.weight_bytes - (1 - bucket.cut) * (bucket.weight_bytes // bucket.shards)
    return int(exchanged_bytes(facts, rates, sum(bucket.sizes), bucket.weight_bytes, bucket.shards))


def evictions_of(problem: Problem, layout: Layout) -> Iterator[Eviction]:
    """The gaps in which the layout's weights are away, and the ticks at which they come back.

    A weight whose addresses no other one needs meanwhile stays there, and is not brought again.
    """
    count = len(problem.ticks)
    present = [sum((1 << end) - (1 << start) for start, end in b.resident_ticks) for b in layout.buckets]  # a bit each
    for gap in problem.gaps:
        mask = present[gap.weight]
        if mask and not mask >> (gap.after + 1) % count & 1:
            later = (mask | mask << count) >> gap.after + 1
            issue = gap.after + (later & -later).bit_length()  # the first tick at which it is there
            absent = (1 << issue) - (1 << gap.after + 1)
            absent |= absent >> count
            if any(absent & present[other] for other in problem.weights[gap.weight].overlapping):
                yield Eviction(gap, issue)


# --- estimated -------------------------------------------------------------------------------------------------------


class _Load(NamedTuple):
    """What buckets at their places add to a step: seconds of the CPU's updates and the bytes of the host's memory that
    they touch; seconds of the device's updates; bytes of new weights, gradients (of one update) and state that cross
    the link, and of gradients that come up with state; all of one rank. ``exchanged`` and ``gathered``: bytes of
    gradients, and of new weights, that it gets from the others over the network. ``disk_s`` are of the disk for state,
    ``read_s`` for weights."""

    cpu_s: float = 0.0
    touched: float = 0.0
    kernel_s: float = 0.0
    new: float = 0.0
    grads: float = 0.0
    state: float = 0.0
    visiting_grads: float = 0.0
    exchanged: float = 0.0
    gathered: float = 0.0
    disk_s: float = 0.0
    read_s: float = 0.0


class Estimate:
    """Estimates for placements of ``places``. The machine's rates must be known."""

    def __init__(self, facts: Facts, request: OffloadRequest, places: Places) -> None:
        assert facts.machine.rates is not None
        self._rates = facts.machine.rates
        self._facts = facts
        self._run = facts.run
        self._request = request
        self._places = places
        times = unit_seconds(facts, self._rates)
        self._forward, self._backward = sum(unit[0] for unit in times), sum(unit[1] for unit in times)
        self._gathers = gather_rate(facts, self._rates)
        self._sums = sums_slowdown(facts, self._rates, request.reduction)
        leaving = [places.buckets[index] for index in places.blocks]
        self._packed = sum(b.copy_bytes for b in leaving) / sum(b.weight_bytes for b in leaving) if leaving else 1.0
        rates = self._rates
        read, write = bytes_per_s(rates, request.disk)
        self._disk_s = (1 / read + 1 / write) / rates.disk_overlap
        self._read_s = 1 / read
        self._write_s = 1 / write
        self._hosted = sum(unit.hosted_bytes for unit in facts.units)
        self.load = cache(self._load_of)

    def seconds(self, placement: Placement, away: int) -> float:
        """Seconds per step; ``away`` bytes of the buckets' weights leave between forward and backward."""
        alike = self._places.alike(placement)
        loads = zip(*[self.load(index, place) for index, place in alike], strict=True)
        return self._seconds(_Load(*[sum(map(mul, alike.values(), load)) for load in loads]), away)

    def _load_of(self, index: int, place: Place) -> _Load:
        bucket = self._places.buckets[index]
        rates = self._rates
        run = self._run
        reads = run.accumulation * 2 * self._read_s  # of a weight
        weight_bytes = bucket.weight_bytes
        count = bucket.share
        site = place.site
        size = weight_bytes // bucket.shards
        if site is Site.NONE:
            return _Load(read_s=place.on_disk * size * reads)
        on_host, goes_down = site is Site.HOST, place.grad_tier is Tier.HOST
        cpu_s, touched = host_update(count, self._request.moments_as, self._facts, rates, masters=bucket.rounds)
        coming = weight_bytes if self._request.common_host and on_host else size
        return _Load(
            cpu_s=on_host * cpu_s,
            touched=on_host * touched,
            kernel_s=0.0 if on_host else device_update(count, rates),
            new=on_host * coming,
            grads=size * run.accumulation if goes_down else on_host * size,
            state=(site is Site.STREAMED) * 4 * (run.moments + bucket.mixed) * count,
            visiting_grads=(site is Site.STREAMED and goes_down) * size,
            exchanged=weight_bytes - size,
            gathered=weight_bytes - coming,
            disk_s=place.on_disk
            * replace(bucket, copy_on_disk=place.copy_on_disk).state_bytes(run.moments)
            * self._disk_s
            + place.copy_on_disk * size * self._write_s,
            read_s=place.copy_on_disk * size * reads,
        )

    def _seconds(self, load: _Load, away: int) -> float:
        """Saved tensors on the host go down under forward and come up under backward, in addition. Exchanges that cross
        the host use both links and its memory.
        """
        rates, passes = self._rates, self._run.accumulation
        forward = self._forward
        backward = self._backward
        saved = passes * self._hosted
        share = away if self._request.common_host else away // self._request.shards
        in_before = load.exchanged + (away - share) * (2 * passes - 1)  # gradients, and what backward gathers again
        share = int(share * self._packed)
        back_up, again_up = share * passes + saved, share * (passes - 1)
        duplex = rates.duplex_factor if load.state else 1
        up, down = rates.up_bytes_per_s * duplex, rates.down_bytes_per_s * duplex
        coming, going = load.new + load.state + load.visiting_grads, load.grads + load.state + saved
        updating, dram = (load.cpu_s, load.touched), rates.dram_bytes_per_s
        if self._request.in_backward:
            compute = passes * (forward + backward) + load.kernel_s
            rising = coming + back_up + again_up
            exchanged = in_before + load.gathered
            copying, moved = self._copies(rising / up, going / down, rising + going, exchanged, load.exchanged)
            return max(compute, _together(updating, (copying, moved), dram), load.disk_s + load.read_s)
        first_saved = self._hosted  # saved by the pass under whose forward the updates run
        rising, falling = back_up + again_up, load.grads + saved - first_saved
        computing = passes * backward + (passes - 1) * forward
        copies = self._copies(rising / up, falling / down, rising + falling, in_before, load.exchanged)
        before = max(computing, _together((0.0, 0.0), copies, dram))
        leaving = load.state + first_saved
        copies = self._copies(coming / up, leaving / down, coming + leaving, load.gathered)
        after = max(forward + load.kernel_s, _together(updating, copies, dram), load.disk_s)
        return max(before + after, load.disk_s + load.read_s)

    def _copies(
        self, up_s: float, down_s: float, num_bytes: float, exchanged: float, summed: float = 0
    ) -> tuple[float, float]:
        """Seconds of the slowest road, and bytes of the host's memory, of copies together with exchanges, of which
        ``summed`` are of gradients.
        """
        rates = self._rates
        through_host = exchanged if rates.net_bytes_per_s is None else 0
        up_s, down_s = up_s + through_host / rates.up_bytes_per_s, down_s + through_host / rates.down_bytes_per_s
        exchanging = (exchanged + (self._sums - 1) * summed) / self._gathers
        return max(up_s, down_s, exchanging), num_bytes + 2 * through_host


def _together(one: tuple[float, float], other: tuple[float, float], rate: float) -> float:
    """Seconds of two works, each (seconds alone, bytes of memory that it uses), that share a memory of ``rate``.

    While both run they slow down alike, as far as they have to; what is left of the longer one runs alone.
    """
    need = sum(size / seconds for seconds, size in (one, other) if seconds)
    shorter, longer = sorted((one[0], other[0]))
    return max(shorter * max(1.0, need / rate) + longer - shorter, (one[1] + other[1]) / rate)
