"""What exchanging the rows of experts takes, and in how many slices it takes the least. Numbers only.

A layer sends rows to their experts and results back, slice by slice. Products of one slice run while others travel;
everything that travels takes the same network, in the order of ``strategies/parallel/expert_exchange.py``. Rows are
assumed to be spread evenly over experts: what one rank has too many, all wait for.

Where the rates of the machine are unknown there are two slices, the least with which anything overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepstow.strategies.core.facts import Facts, Param, RunFacts
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.exchanges import straight

MOST = 8  # slices that are tried


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of one layer's forward, of one micro-batch."""

    slices: int
    num_bytes: int  # of a rank's rows
    sent_bytes: int  # of them to other ranks
    products: float | None = None  # seconds of all of them; None: rates are unknown
    wire: float = 0.0  # seconds of sending all rows one way
    wait: float = 0.0  # that each exchange takes besides

    @property
    def alone(self) -> float:
        """Seconds of the exchanges of a pass."""
        return 2 * (self.wire + self.wait * self.slices)

    def exposed(self, times: float) -> float:
        """Seconds of them that products which take ``times`` those of forward do not hide."""
        products = times * (self.products or 0.0)
        return layer_seconds(products, self.wire, self.wait, self.slices) - products

    @property
    def words(self) -> str:
        many = f"{self.slices} slice{'s' * (self.slices > 1)}"
        said = f"rows to experts and back in {many}: {human(self.sent_bytes)} sent each way per layer and micro-batch"
        if self.products is None:
            return said
        seconds, hidden = self.products + self.exposed(1), 1 - self.exposed(1) / self.alone
        return f"{said}, {seconds * 1e3:.3g} ms with the products (simulated), {hidden:.0%} of it hidden"


def rows_bytes(run: RunFacts) -> int:
    """Of a micro-batch's rows, each as often as it has experts."""
    rows = run.micro_batch * run.sequence * run.experts_per_token
    return rows * run.hidden_size * run.precision.element_bytes


def exchanges_of(facts: Facts, experts: Sequence[Param], degree: int, slices: int | None) -> Exchanges:
    """What it takes in ``slices``, or in the number that takes the least; ``experts``: weights that a rank has."""
    run, rates = facts.run, facts.machine.rates
    rows = run.micro_batch * run.sequence * run.experts_per_token
    num_bytes = rows_bytes(run)
    sent = num_bytes * (degree - 1) // degree
    local = max(1, run.num_experts // degree)
    if rates is None or not experts:
        return Exchanges(slices or min(2, local), num_bytes, sent)
    layers = len({param.unit for param in experts})
    flops = 2 * rows * sum(param.num_elements for param in experts) / layers / local
    products = flops / rates.gemm_flops(run.precision)
    road = straight(facts, rates, degree)
    wire, wait = sent / road.bytes_per_s, road.latency_s * (degree - 1)
    found = {count: layer_seconds(products, wire, wait, count) for count in range(1, min(MOST, local) + 1)}
    chosen = slices or min(found, key=lambda count: (found[count], count))
    return Exchanges(chosen, num_bytes, sent, products, wire, wait)


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
