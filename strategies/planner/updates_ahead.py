"""Which updates the CPU makes ahead of the norm (``core/ahead.py``): as many as make the simulated step shorter.

The state of a bucket that is updated ahead takes twice its memory. Backward finishes the last buckets first, so these
are taken first, as far as the host has room; of several numbers of them the simulator chooses. Where it says that they
gain less than ``WORTH``, none are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deepstow.strategies.core.ahead import may_update_ahead
from deepstow.strategies.core.facts import Home
from deepstow.strategies.core.layout import Layout, aligned, gradient_tick, ticks_of
from deepstow.strategies.planner.addresses import place

WORTH = 0.01


def with_updates_ahead(layout: Layout, host_room: int, parts: int) -> list[Layout]:
    """``layout`` with ever more updates that are made ahead, in so many steps up to all that ``host_room`` is enough
    for.
    """
    at, room = ticks_of(layout.units), host_room - place(layout).num_bytes(Home.HOST)
    may = [index for index, bucket in enumerate(layout.buckets) if may_update_ahead(bucket, layout)]
    fit = list[int]()
    for index in sorted(may, key=lambda index: (gradient_tick(layout.buckets[index], at), -index)):
        size = aligned(4 * (layout.moments + 1) * layout.buckets[index].share, Home.HOST)
        if size <= room:
            fit, room = [*fit, index], room - size
    numbers = sorted({len(fit) * part // parts for part in range(1, parts + 1)} - {0})
    return [_with(layout, {*fit[:number]}) for number in numbers]


def fastest(layout: Layout, others: list[Layout], seconds: Callable[[Layout], float]) -> tuple[Layout, float]:
    """That of ``others`` with the least ``seconds``, or ``layout`` if it takes about as long; and its seconds."""
    now = seconds(layout)
    found, best = min(((one, seconds(one)) for one in others), key=lambda pair: pair[1], default=(layout, now))
    return (found, best) if best < now * (1 - WORTH) else (layout, now)


def _with(layout: Layout, some: set[int]) -> Layout:
    buckets = (replace(bucket, updates_ahead=index in some) for index, bucket in enumerate(layout.buckets))
    return replace(layout, buckets=tuple(buckets))
