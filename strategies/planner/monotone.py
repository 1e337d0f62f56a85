"""A search by budget that is monotone: more memory is never slower, exactly, whatever the plans are that it finds.

The fastest plan that a heuristic finds for a budget may be slower than the one that it finds for less. The plan for the
least budget and the plan for any amount are the ends of an interval, each at the bytes that it needs. A plan is
searched for the middle of the interval, which is cut at the bytes that this plan needs, down to the budget; what is
searched depends on the ends alone. Taken is the fastest plan that is as fast as the lower end's and not faster than the
upper end's; if there is none, the lower end's plan is used up to the middle. So values are ordered at the ends of every
interval, and a budget gets the plan of its interval's lower end. (A plan that is faster than the upper end's is not
used: whoever has more memory did not get it.)

Of equally fast plans the one that needs more of the budget is taken: it offloads less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Generic, TypeVar

NEAR = 0.01  # a relative difference of budgets that is not worth another search

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A plan, the bytes that it needs, and its seconds."""

    num_bytes: int
    seconds: float
    plan: T


def at_budget(budget: int, low: Found[T], most_bytes: int, find: Callable[[int], Sequence[Found[T]]]) -> Found[T]:
    """A plan within ``budget``, which is at least what ``low`` needs.

    Args:
        low: the plan that needs the least.
        most_bytes: a budget beyond which nothing changes.
        find: plans within a budget, the same for the same budget.
    """
    assert budget >= low.num_bytes
    high = _between(find(max(most_bytes, low.num_bytes)), low, 0.0) or low
    edge = low.num_bytes  # up to here plans have been searched
    while budget < high.num_bytes and high.num_bytes - edge > NEAR * high.num_bytes:
        middle = isqrt(edge * high.num_bytes)
        cut = _between(find(middle), low, high.seconds) or replace(low, num_bytes=middle)
        if budget >= cut.num_bytes:
            low, edge = cut, middle + 1
        else:
            high = cut
    return high if budget >= high.num_bytes else low


def _between(found: Sequence[Found[T]], low: Found[T], least_seconds: float) -> Found[T] | None:
    """The fastest of ``found`` that is as fast as ``low`` and takes at least ``least_seconds``."""
    some = [one for one in found if least_seconds <= one.seconds <= low.seconds]
    best = min(some, key=lambda one: (one.seconds, -one.num_bytes), default=None)
    return None if best is None else replace(best, num_bytes=max(best.num_bytes, low.num_bytes))
