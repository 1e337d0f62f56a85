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

from strategies.core.facts import Home
from strategies.core.layout import ALIGN_BYTES, aligned


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


def host_room(num_bytes: int, num_operators: int) -> int:
    """Bytes to reserve on the host for outputs of so many operators, in whole pages.

    Each output starts on a boundary of ALIGN_BYTES, and an operator has up to four outputs.
    """
    return aligned(num_bytes + 4 * ALIGN_BYTES * num_operators, Home.HOST)
