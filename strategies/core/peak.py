"""The peak along backward: what was saved and the gradients, added up unit by unit.

At the backward of unit i, what units 0..i saved and the gradients of units i..last are alive together; where unit i is
recomputed, so is all that its forward saves.

What waits on the host leaves under the forward of the next unit, and comes back under the backward of the next unit. So
at the backward of unit i, what it has on the host is there, and what the unit before it has there arrives. Forward is
the same in reverse, with less of everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOSTED_ALIGN = 512  # places on the host begin on such a boundary


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of one unit on the device from its forward on, on the device during its backward, and on the host.

    What waits on the host is among the bytes during backward.
    """

    waiting: int
    working: int
    hosted: int = 0


def backward_peak(units: Sequence[Saved], grads: Sequence[int]) -> int:
    """Largest sum of saved tensors and gradients along backward, last unit first.

    Args:
        grads: bytes of gradients that appear with each unit's backward.
    """
    before, after, highest = sum(unit.waiting for unit in units), 0, 0
    for index in reversed(range(len(units))):
        unit = units[index]
        before, after = before - unit.waiting, after + grads[index]
        arriving = units[index - 1].hosted if index else 0
        highest = max(highest, before + unit.working + arriving + after)
    return highest


def places(num_bytes: int, number: int) -> int:
    """Room on the host for outputs of so many operators. Each output has a place; an operator has up to four."""
    return num_bytes + 4 * HOSTED_ALIGN * number
