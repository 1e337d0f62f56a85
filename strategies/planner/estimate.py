"""How long a step will take, from the totals of each resource: good enough to rank layouts, in microseconds.

With clipping a step has two phases, since no update may begin before the norm is known:

    backward   max(compute, gradients down, weights that come back up)
    forward    max(compute and updates on the device, the CPU's updates, new weights and state up, state down)

and their sum is the estimate; without clipping all of it overlaps. Copies and the CPU's updates share the host's
memory. Waits that come from the order of copies are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strategies.core.facts import HOST_UPDATE_BYTES, Facts, Home
from strategies.core.layout import Bucket, Site
from strategies.planner.exchanges import gather_rate, sums_slowdown
from strategies.planner.state_placement import OffloadRequest, Place
from strategies.planner.step_cost import TOUCHED_BYTES, unit_seconds


@dataclass(frozen=True, slots=True)
class Load:
    """What buckets at their places add to a step: seconds of the CPU's updates and the bytes of the host's memory that
    they touch; seconds of the device's updates; bytes of new weights, gradients (of one update) and state that cross
    the link, and of gradients that come up with state; all of one rank. ``exchanged`` and ``gathered``: bytes of
    gradients, and of new weights, that it gets from the others over the network, where ``ways`` ranks share the
    buckets."""

    cpu_s: float
    touched: int
    kernel_s: float
    new: int
    grads: int
    state: int
    visiting_grads: int
    exchanged: int
    gathered: int
    ways: int


class Estimate:
    """Estimates for one model and run, as ``request`` wants it. The machine's rates must be known."""

    def __init__(self, facts: Facts, request: OffloadRequest) -> None:
        assert facts.machine.rates is not None
        self._rates, self._run, self._in_backward = facts.machine.rates, facts.run, request.in_backward
        self._common_host = request.common_host
        times = unit_seconds(facts, self._rates)
        self._forward, self._backward = sum(one[0] for one in times), sum(one[1] for one in times)
        self._gathers = gather_rate(facts, self._rates)
        self._sums = sums_slowdown(facts, self._rates, request.reduction)
        self._hosted = sum(unit.hosted_bytes for unit in facts.units)

    def load(self, placed: Iterable[tuple[Bucket, Place]]) -> Load:
        """What buckets at these places add."""
        rates, run = self._rates, self._run
        cpu = kernel = 0.0
        touched = new = grads = state = visiting_grads = exchanged = gathered = 0
        ways = 1
        update, touch = rates.update_params_per_s(run.precision), TOUCHED_BYTES / rates.device_bytes_per_s
        for bucket, (site, grad_home, *_) in placed:
            whole, count, ways = bucket.weight_bytes, bucket.share, bucket.ways
            size = whole // ways
            coming = whole if self._common_host and site is Site.HOST else size
            if site is not Site.NONE:
                exchanged += whole - size
                gathered += whole - coming
            if site is Site.HOST:
                cpu += count / update
                touched += HOST_UPDATE_BYTES * count
                new += coming
            elif site is not Site.NONE:
                kernel += count * touch
            if grad_home is Home.HOST:
                grads += size * run.accumulation
            elif site is Site.HOST:
                grads += size
            if site is Site.STREAMED:
                state += 4 * (run.moments + bucket.mixed) * count
                visiting_grads += size if grad_home is Home.HOST else 0
        return Load(cpu, touched, kernel, new, grads, state, visiting_grads, exchanged, gathered, ways)

    def seconds(self, load: Load, away: int) -> float:
        """Seconds per step; ``away`` bytes of the buckets' weights leave between forward and backward.

        Saved tensors on the host go down under forward and come up under backward, in addition. Exchanges that cross
        the host use both links and its memory.
        """
        rates, passes = self._rates, self._run.accumulation
        forward, backward, saved = self._forward, self._backward, passes * self._hosted
        own = away if self._common_host else away // load.ways
        in_before = load.exchanged + (away - own) * (2 * passes - 1)  # gradients, and what backward gathers again
        back_up, again_up = own * passes + saved, own * (passes - 1)
        duplex = rates.duplex_factor if load.state else 1
        up, down = rates.up_bytes_per_s * duplex, rates.down_bytes_per_s * duplex
        coming, going = load.new + load.state + load.visiting_grads, load.grads + load.state + saved
        updating, dram = (load.cpu_s, load.touched), rates.dram_bytes_per_s
        if self._in_backward:
            compute = passes * (forward + backward) + load.kernel_s
            rising = coming + back_up + again_up
            exchanged = in_before + load.gathered
            copying, moved = self._copies(rising / up, going / down, rising + going, exchanged, load.exchanged)
            return max(compute, _together(updating, (copying, moved), dram))
        first = self._hosted  # saved by the pass under whose forward the updates run
        rising, falling = back_up + again_up, load.grads + saved - first
        computing = passes * backward + (passes - 1) * forward
        copies = self._copies(rising / up, falling / down, rising + falling, in_before, load.exchanged)
        before = max(computing, _together((0.0, 0.0), copies, dram))
        leaving = load.state + first
        copies = self._copies(coming / up, leaving / down, coming + leaving, load.gathered)
        after = max(forward + load.kernel_s, _together(updating, copies, dram))
        return before + after

    def _copies(self, up_s: float, down_s: float, num_bytes: int, exchanged: int, summed: int = 0) -> tuple[float, int]:
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
