"""A search by budget that is monotone: more memory is never slower, exactly, whatever the plans are that it finds.

Problem. The fastest plan that a heuristic finds for a budget may be slower than the one that it finds for less. Trying
all smaller budgets too would cure this, at the cost of all of them.

Budgets are halved from the least with a plan and the one beyond which nothing changes: a budget is followed down to the
interval that it lies in, and gets the plan of that interval's lower end. Which budgets are tried, and what is found
there, depends on the two ends alone. At the middle of an interval the fastest plan is taken that is as fast as the
lower end's and not faster than the upper end's; if none is, the middle gets the lower end's plan, which fits there too.
So values are ordered at the ends of every interval, from the first one down to the last, and therefore everywhere. (A
plan for less that is faster than one for more says that the upper end's could be better; it has been used by then.)

Cost: as many evaluations as halvings, until the ends differ by less than ``WORTH`` in time or ``NEAR`` in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Generic, TypeVar

WORTH = 0.004  # a relative difference in time that is not worth another evaluation
NEAR = 0.004  # budgets whose relative difference is less have one plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A budget in bytes, and a plan within it with its seconds."""

    num_bytes: int
    seconds: float
    plan: T


def at_budget(budget: int, low: Found[T], most_bytes: int, find: Callable[[int], Sequence[Found[T]]]) -> Found[T]:
    """A plan within ``budget``, which is at least that of ``low``.

    Args:
        low: the plan of the least budget.
        most_bytes: the budget beyond which nothing changes.
        find: plans within a budget, the same for the same budget.
    """
    assert budget >= low.num_bytes
    high = _between(find(most_bytes), low, 0.0) if most_bytes > low.num_bytes else low
    if budget >= most_bytes:
        return high
    high = replace(high, num_bytes=most_bytes)
    while low.seconds - high.seconds > WORTH * low.seconds and high.num_bytes - low.num_bytes > NEAR * high.num_bytes:
        middle = isqrt(low.num_bytes * high.num_bytes)
        if middle <= low.num_bytes:
            break
        found = replace(_between(find(middle), low, high.seconds), num_bytes=middle)
        low, high = (found, high) if budget >= middle else (low, found)
    return low


def _between(found: Sequence[Found[T]], low: Found[T], least_seconds: float) -> Found[T]:
    """The fastest of ``found`` that is as fast as ``low`` and takes at least ``least_seconds``; if there is none, ``low``."""
    some = [one for one in found if least_seconds <= one.seconds <= low.seconds]
    return min(some, key=lambda one: one.seconds, default=low)
