"""Whether ranks get each other's parts of weights over the network, or copy them up from their common host.

Weights follow each other, so what counts is the road that is busy for the longest time per byte of weight. Of ``ways``
ranks each copies its own part up and gets the others over the network; an exchange by way of the host uses its link in
both directions, and writes and reads the host's memory. From a common host each rank copies all parts up.
"""

from __future__ import annotations

from strategies.core.facts import Rates


def from_host(rates: Rates, ways: int) -> bool:
    """Whether weights come sooner, or as soon, if each rank copies all parts up; ``rates`` are one rank's."""
    others = (ways - 1) / ways
    crossing = 0.0 if rates.net_bytes_per_s else others
    link_s = (1 - others + crossing) / rates.up_bytes_per_s
    dram_s = (1 - others + 2 * crossing) / rates.dram_bytes_per_s
    network_s = max(link_s, dram_s, others / rates.exchange_bytes_per_s())
    return max(1 / rates.up_bytes_per_s, 1 / rates.dram_bytes_per_s) <= network_s
