"""What exchanging the rows of experts takes, and in how many slices it takes the least. Numbers only.

A layer sends rows to their experts and results back, slice by slice. Products of one slice run while others travel;
everything that travels takes the same network, in the order of ``strategies/backends/expert_exchange.py``. Rows are
assumed to be spread evenly over experts: what one rank has too many, all wait for.

Where the rates of the machine are unknown there are two slices, the least with which anything overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.core.facts import Facts, Param, Rates
from strategies.core.sizes import human

MOST = 8  # slices that are tried


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of one layer's forward, of one micro-batch. ``seconds``: of the layer; None: rates are unknown."""

    slices: int
    num_bytes: int  # of a rank's rows
    sent_bytes: int  # of them to other ranks
    seconds: float | None
    hidden: float  # of what the exchanges take, the part that products hide

    @property
    def words(self) -> str:
        many = f"{self.slices} slice{'s' * (self.slices > 1)}"
        said = f"rows to experts and back in {many}: {human(self.sent_bytes)} sent each way per layer and micro-batch"
        if self.seconds is None:
            return said
        return f"{said}, {self.seconds * 1e3:.3g} ms with the products (simulated), {self.hidden:.0%} of it hidden"


def exchanges_of(facts: Facts, experts: Sequence[Param], degree: int, slices: int | None) -> Exchanges:
    """What it takes in ``slices``, or in the number that takes the least; ``experts``: weights that a rank has."""
    run, rates = facts.run, facts.machine.rates
    rows = run.micro_batch * run.sequence * run.experts_per_token
    num_bytes = rows * run.hidden_size * run.precision.element_bytes
    sent = num_bytes * (degree - 1) // degree
    local = max(1, run.num_experts // degree)
    if rates is None or not experts:
        return Exchanges(slices or min(2, local), num_bytes, sent, None, 0.0)
    layers = len({param.unit for param in experts})
    flops = 2 * rows * sum(param.num_elements for param in experts) / layers / local
    products = flops / rates.gemm_flops(run.precision)
    wire = sent / _rate(facts, rates, degree)
    wait = _latency(facts, rates, degree) * (degree - 1)
    found = {count: layer_seconds(products, wire, wait, count) for count in range(1, min(MOST, local) + 1)}
    chosen = slices or min(found, key=lambda count: (found[count], count))
    seconds = found.get(chosen, layer_seconds(products, wire, wait, chosen))
    exchange = 2 * (wire + wait * chosen)
    return Exchanges(chosen, num_bytes, sent, seconds, (products + exchange - seconds) / exchange)


def layer_seconds(products: float, wire: float, wait: float, slices: int) -> float:
    """Seconds of a layer: of all ``products``, of sending all rows one way, and what each exchange waits besides."""
    piece = wire / slices + wait
    network = piece  # when it is free: the first slice has arrived
    arrived = done = piece
    for number in range(slices):
        if number + 1 < slices:
            network += piece
        following = network
        done = max(done, arrived) + products / slices
        network = max(network, done) + piece
        arrived = following
    return network


def _rate(facts: Facts, rates: Rates, degree: int) -> float:
    """Bytes per second that a rank sends to the others that have experts, which may be on other machines."""
    across = rates.net_across_bytes_per_s
    here = facts.machine.ranks or degree
    return min(rates.exchange_bytes_per_s(), across) if across and degree > here else rates.exchange_bytes_per_s()


def _latency(facts: Facts, rates: Rates, degree: int) -> float:
    crosses = degree > (facts.machine.ranks or degree)
    return rates.net_across_latency_s if crosses else rates.net_latency_s
