"""How long a step will take, from the totals of each resource: good enough to rank layouts, in microseconds.

With clipping a step has two phases, since no update may begin before the norm is known:

    backward   max(compute, gradients down, weights that come back up)
    forward    max(compute and updates on the device, the CPU's updates, new weights and state up, state down)

and their sum is the estimate. Copies and the CPU's updates share the host's memory, which takes every copied byte once,
and what updates touch. Without clipping all of it overlaps, and the busiest resource is the estimate. Waits that come
from the order of copies are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.core.facts import HOST_UPDATE_BYTES, Facts, Home
from strategies.core.layout import Bucket, Site
from strategies.planner.state_placement import Place
from strategies.planner.step_cost import TOUCHED_BYTES, unit_seconds


def estimate(facts: Facts, placed: Iterable[tuple[Bucket, Place]], away: int, *, in_backward: bool) -> float:
    """Seconds per step of buckets at these places; ``away`` bytes of their weights leave between forward and backward.

    Saved tensors on the host go down under forward and come up under backward, in addition. The machine's rates must be
    known.
    """
    rates, run = facts.machine.rates, facts.run
    assert rates is not None
    cpu = kernel = touched = 0.0
    new = grads = state = visiting_grads = 0
    update, touch = rates.update_params_per_s(run.precision), TOUCHED_BYTES / rates.device_bytes_per_s
    for bucket, (site, grad_home) in placed:
        size, count = bucket.weight_bytes, bucket.num_elements
        if site is Site.HOST:
            cpu += count / update
            touched += HOST_UPDATE_BYTES * count
            new += size
        elif site is not Site.NONE:
            kernel += count * touch
        if grad_home is Home.HOST:
            grads += size * run.accumulation
        elif site is Site.HOST:
            grads += size
        if site is Site.STREAMED:
            state += 4 * (run.moments + bucket.mixed) * count
            visiting_grads += size if grad_home is Home.HOST else 0
    passes = run.accumulation
    times = unit_seconds(facts, rates)
    forward, backward = sum(one[0] for one in times), sum(one[1] for one in times)
    saved = passes * sum(unit.hosted_bytes for unit in facts.units)
    back_up, again_up = away * passes + saved, away * (passes - 1)
    up = rates.up_bytes_per_s * (rates.duplex_factor if state else 1)
    down = rates.down_bytes_per_s * (rates.duplex_factor if state else 1)
    coming, going = new + state + visiting_grads, grads + state + saved
    cpu_work, dram = (cpu, touched), rates.dram_bytes_per_s
    if in_backward:
        compute = passes * (forward + backward) + kernel
        rising = coming + back_up + again_up
        return max(compute, _together(cpu_work, (max(rising / up, going / down), rising + going), dram))
    first = saved // passes  # of the pass under whose forward the updates run
    rising, falling = back_up + again_up, grads + saved - first
    computing, copying = passes * backward + (passes - 1) * forward, max(falling / down, rising / up)
    before = max(computing, _together((0.0, 0.0), (copying, rising + falling), dram))
    leaving = state + first
    copying = max(coming / up, leaving / down)
    after = max(forward + kernel, _together(cpu_work, (copying, coming + leaving), dram))
    return before + after


def _together(one: tuple[float, float], other: tuple[float, float], rate: float) -> float:
    """Seconds of two works, each (seconds alone, bytes of memory that it uses), that share a memory of ``rate``.

    While both run they slow down alike, as far as they have to; what is left of the longer one runs alone.
    """
    need = sum(size / seconds for seconds, size in (one, other) if seconds)
    shorter, longer = sorted((one[0], other[0]))
    return max(shorter * max(1.0, need / rate) + longer - shorter, (one[1] + other[1]) / rate)
