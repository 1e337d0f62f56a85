"""How long a step will take, from the totals of each resource: good enough to rank layouts, in microseconds.

With clipping a step has two phases, since no update may begin before the norm is known:

    backward   max(compute, gradients down, weights that come back up)
    forward    max(compute and updates on the device, the CPU's updates, new weights and state up, state down)

and their sum is the estimate. Without clipping all of it overlaps, and the busiest resource is the estimate. Waits that
come from the order of copies are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.core.facts import Facts, Home
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
    cpu = kernel = 0.0
    new = grads = state = visiting_grads = 0
    update, touch = rates.update_params_per_s(run.precision), TOUCHED_BYTES / rates.device_bytes_per_s
    for bucket, (site, grad_home) in placed:
        size, count = bucket.weight_bytes, bucket.num_elements
        if site is Site.HOST:
            cpu += count / update
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
    if in_backward:
        compute = passes * (forward + backward) + kernel
        return max(
            compute, cpu, (new + back_up + again_up + state + visiting_grads) / up, (grads + state + saved) / down
        )
    first = saved // passes  # of the pass under whose forward the updates run
    before = max(passes * backward + (passes - 1) * forward, (grads + saved - first) / down, (back_up + again_up) / up)
    after = max(forward + kernel, cpu, (new + state + visiting_grads) / up, (state + first) / down)
    return before + after
