"""The peak along forward and backward: saved tensors, gradients and temporaries, added up unit by unit.

At the backward of unit i, what units 0..i saved, the temporaries of its backward and the gradients of units i..last are
alive together. If unit i is recomputed, so is everything that its forward saves. At the forward of unit i, what units
0..i save and the temporaries of its forward are: less, except in a head with many words. Temporaries are counted on the
model (``trainer/model/temporaries.py``); without a count they are 0.

What waits on the host is copied down during the forward of the next unit, and copied up during the backward of the next
unit: at the backward of unit i, its own hosted tensors are on the device, and those of the unit before it arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepstow.strategies.core.facts import Temporaries, Tier
from deepstow.strategies.core.layout import ALIGN_BYTES, aligned


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that one unit saves."""

    waiting: int  # on the device, from its forward to its backward
    working: int  # on the device during its backward, with what came back from the host
    hosted: int = 0  # on the host, from its forward to its backward
    temporaries: Temporaries | None = None  # beyond ``working``


def backward_peak(units: Sequence[Saved], grads: Sequence[int]) -> int:
    """Largest sum of saved tensors, temporaries and gradients along backward, last unit first.

    Args:
        grads: bytes of gradients that each unit's backward makes and leaves where they were not before.
    """
    before = sum([unit.waiting for unit in units])
    after = 0
    highest = 0
    arriving = [0, *[unit.hosted for unit in units]][: len(units)]
    for unit, grad, hosted in zip(reversed(units), reversed(grads), reversed(arriving), strict=True):
        before -= unit.waiting
        present, temporaries = grad, unit.temporaries
        if temporaries is not None:
            # Temporaries of its backward together with what has landed of its gradients. Those that land where there
            # is memory for them already leave only the former. Not all of them have landed while the largest
            # temporaries are there: ``landing`` is what was counted, with whole gradients.
            present = temporaries.backward + grad
            if temporaries.landing < present:
                present = temporaries.landing
        present += before + unit.working + hosted + after
        if present > highest:
            highest = present
        after += grad
    return highest


def forward_peak(units: Sequence[Saved]) -> int:
    """The same along forward, without gradients."""
    before = highest = leaving = 0
    for unit in units:
        present = before + unit.working + leaving + (unit.temporaries.forward if unit.temporaries else 0)
        if present > highest:
            highest = present
        before += unit.waiting
        leaving = unit.hosted
    return highest


def passes_peak(units: Sequence[Saved], grads: Sequence[int], in_flight: int) -> int:
    """The peak of forward and backward, with what other micro-batches keep where several are ``in_flight``."""
    others = (in_flight - 1) * sum(unit.waiting for unit in units)
    return others + max(forward_peak(units), backward_peak(units, grads))


def layerwise_saved(
    units: Sequence[Saved], count: int, crossing: int, gradients: Sequence[int], *, keeps_heads: bool
) -> list[Saved]:
    """``units`` where ``count`` micro-batches take turns in each of them, the last of which is the head.

    What one micro-batch saves stays while the others run, and so do hidden states, or their gradients, between two
    units: ``crossing`` bytes of each. The ``gradients`` of a unit's weights are added up before they land. Heads run
    one by one, and only the gradients of what they have read are kept, unless the run ``keeps_heads``.
    """
    saved = []
    for index, (unit, grad) in enumerate(zip(units, gradients, strict=True)):
        others = (count - 1) * crossing
        was = unit.temporaries or Temporaries(0, 0, 0)
        temporaries = Temporaries(was.forward + others, was.backward + others + grad, was.landing + others + grad)
        waits = unit.waiting
        if index < len(units) - 1 or keeps_heads:
            waits, working = count * unit.waiting, unit.working + (count - 1) * unit.waiting
        else:
            working = unit.working
        saved.append(replace(unit, waiting=waits, working=working, temporaries=temporaries))
    return saved


def host_room(num_bytes: int, num_operators: int) -> int:
    """Bytes to reserve on the host for outputs of so many operators, in whole pages: an operator has up to four outputs
    and each starts on a boundary of ALIGN_BYTES.
    """
    return aligned(num_bytes + 4 * ALIGN_BYTES * num_operators, Tier.HOST)
