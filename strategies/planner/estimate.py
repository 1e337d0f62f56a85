"""How long a step will take, from the totals of each resource: good enough to rank layouts, in microseconds.

With clipping a step has two phases, since no update may begin before the norm is known:

    backward   max(compute, gradients down, weights that come back up)
    forward    max(compute and updates on the device, the CPU's updates, new weights and state up, state down)

and their sum is the estimate. Without clipping all of it overlaps, and the busiest resource is the estimate. Waits that
come from the order of copies are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strategies.core.facts import Facts, Home
from strategies.core.layout import Bucket, Site
from strategies.planner.state_placement import Place
from strategies.planner.step_cost import TOUCHED_BYTES, unit_seconds


@dataclass(frozen=True, slots=True)
class Load:
    """What buckets at their places add to a step: seconds of the CPU's updates and of the device's, and bytes of new
    weights, gradients (of one update) and state that cross the link, and of gradients that come up with state."""

    cpu_s: float
    kernel_s: float
    new: int
    grads: int
    state: int
    visiting_grads: int


class Estimate:
    """Estimates for one model and run. The machine's rates must be known."""

    def __init__(self, facts: Facts, *, in_backward: bool) -> None:
        assert facts.machine.rates is not None
        self._rates, self._run, self._in_backward = facts.machine.rates, facts.run, in_backward
        times = unit_seconds(facts, self._rates)
        self._forward, self._backward = sum(one[0] for one in times), sum(one[1] for one in times)
        self._hosted = sum(unit.hosted_bytes for unit in facts.units)

    def load(self, placed: Iterable[tuple[Bucket, Place]]) -> Load:
        """What buckets at these places add."""
        rates, run = self._rates, self._run
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
        return Load(cpu, kernel, new, grads, state, visiting_grads)

    def seconds(self, load: Load, away: int) -> float:
        """Seconds per step; ``away`` bytes of the buckets' weights leave between forward and backward.

        Saved tensors on the host go down under forward and come up under backward, in addition.
        """
        rates, passes = self._rates, self._run.accumulation
        forward, backward, saved = self._forward, self._backward, passes * self._hosted
        back_up, again_up = away * passes + saved, away * (passes - 1)
        duplex = rates.duplex_factor if load.state else 1
        up, down = rates.up_bytes_per_s * duplex, rates.down_bytes_per_s * duplex
        if self._in_backward:
            compute = passes * (forward + backward) + load.kernel_s
            to_device = load.new + back_up + again_up + load.state + load.visiting_grads
            return max(compute, load.cpu_s, to_device / up, (load.grads + load.state + saved) / down)
        first = self._hosted  # saved by the pass under whose forward the updates run
        before = max(
            passes * backward + (passes - 1) * forward, (load.grads + saved - first) / down, (back_up + again_up) / up
        )
        after = max(
            forward + load.kernel_s,
            load.cpu_s,
            (load.new + load.state + load.visiting_grads) / up,
            (load.state + first) / down,
        )
        return before + after
