"""Two update sites at once: of the buckets whose state rests on the host, some are streamed through the device.

The CPU's memory and the link are two roads for the same state, and each idles while the other works. A part of the
hosted buckets, spread evenly, takes the link; the simulator says which part is fastest. Without rates, or where the
visiting state does not fit, all stay with the CPU.

Source: "Deep Optimizer States" (arXiv 2410.21316) interleaves updates of the GPU and the CPU by a performance model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from strategies.core.facts import Facts
from strategies.core.layout import Layout, Site
from strategies.planner.price import price_of

PARTS = 8  # shares that are tried: none, one eighth, ... all
GAIN = 0.02  # what a share must save to be taken: less is within what the simulator does not know


def balanced(facts: Facts, layout: Layout, fits: Callable[[Layout], bool]) -> Layout:
    """``layout``, or the same with some host updates streamed if that is simulated to be faster and ``fits``."""
    rates = facts.machine.rates
    hosted = [index for index, bucket in enumerate(layout.buckets) if bucket.site is Site.HOST]
    if rates is None or not hosted or not facts.run.forward_flops:
        return layout
    best, seconds = layout, price_of(facts, layout, rates).seconds
    for eighths in range(1, PARTS + 1):
        candidate = _streamed(layout, hosted, eighths)
        if fits(candidate):
            found = price_of(facts, candidate, rates).seconds
            if found < seconds * (1 - GAIN):
                best, seconds = candidate, found
    return best


def cheapest(facts: Facts, layouts: Sequence[Layout]) -> Layout:
    """The layout whose simulated step is the shortest; the first, where nobody knows or it does not matter."""
    rates = facts.machine.rates
    if rates is None or not facts.run.forward_flops or len(layouts) == 1:
        return layouts[0]
    seconds = [price_of(facts, layout, rates).seconds for layout in layouts]
    best = min(range(len(layouts)), key=seconds.__getitem__)
    return layouts[best] if seconds[best] < seconds[0] * (1 - GAIN) else layouts[0]


def _streamed(layout: Layout, hosted: list[int], eighths: int) -> Layout:
    """``eighths`` of the hosted buckets streamed, spread evenly over them."""
    chosen = {
        index
        for number, index in enumerate(hosted, start=1)
        if number * eighths // PARTS > (number - 1) * eighths // PARTS
    }
    buckets = tuple(
        replace(bucket, site=Site.STREAMED) if index in chosen else bucket
        for index, bucket in enumerate(layout.buckets)
    )
    return replace(layout, buckets=buckets)
