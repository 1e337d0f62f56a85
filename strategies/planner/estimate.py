"""How long a step will take, from the totals of each resource: good enough to rank placements, in microseconds.

With clipping a step has two phases, since no update may begin before the norm is known:

    backward   max(compute, gradients down, weights that come back up)
    forward    max(compute and updates on the device, the CPU's updates, new weights and state up, state down)

and their sum is the estimate; without clipping all of it overlaps. Copies and the CPU's updates share the host's
memory. Waits that come from the order of copies are left to the simulator.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from operator import mul
from typing import NamedTuple

from deepstow.strategies.core.facts import HOST_UPDATE_BYTES, Facts, Tier
from deepstow.strategies.core.formats import slower, touched_bytes
from deepstow.strategies.core.layout import Site
from deepstow.strategies.core.on_disk import bytes_per_s
from deepstow.strategies.planner.exchanges import gather_rate, sums_slowdown
from deepstow.strategies.planner.places import OffloadRequest, Place, Placement, Places
from deepstow.strategies.planner.step_cost import TOUCHED_BYTES, unit_seconds


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
        self._run = facts.run
        self._request = request
        self._places = places
        times = unit_seconds(facts, self._rates)
        self._forward, self._backward = sum(one[0] for one in times), sum(one[1] for one in times)
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
        whole = bucket.weight_bytes
        count = bucket.share
        site = place.site
        size = whole // bucket.shards
        if site is Site.NONE:
            return _Load(read_s=place.on_disk * size * reads)
        kind = self._request.moments_as
        on_host, goes_down = site is Site.HOST, place.grad_tier is Tier.HOST
        coming = whole if self._request.common_host and on_host else size
        return _Load(
            cpu_s=on_host * count * slower(kind, masters=bucket.rounds) / rates.update_params_per_s(run.precision),
            touched=on_host * touched_bytes(kind, HOST_UPDATE_BYTES, masters=bucket.rounds) * count,
            kernel_s=0.0 if on_host else count * TOUCHED_BYTES / rates.device_bytes_per_s,
            new=on_host * coming,
            grads=size * run.accumulation if goes_down else on_host * size,
            state=(site is Site.STREAMED) * 4 * (run.moments + bucket.mixed) * count,
            visiting_grads=(site is Site.STREAMED and goes_down) * size,
            exchanged=whole - size,
            gathered=whole - coming,
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
        own = away if self._request.common_host else away // self._request.shards
        in_before = load.exchanged + (away - own) * (2 * passes - 1)  # gradients, and what backward gathers again
        own = int(own * self._packed)
        back_up, again_up = own * passes + saved, own * (passes - 1)
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
        first = self._hosted  # saved by the pass under whose forward the updates run
        rising, falling = back_up + again_up, load.grads + saved - first
        computing = passes * backward + (passes - 1) * forward
        copies = self._copies(rising / up, falling / down, rising + falling, in_before, load.exchanged)
        before = max(computing, _together((0.0, 0.0), copies, dram))
        leaving = load.state + first
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
