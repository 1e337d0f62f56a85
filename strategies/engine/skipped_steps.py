"""Which steps were skipped, said as soon as it is known without waiting, and when to stop.

A step whose gradients are not finite changes nothing. The device finds that out while later work is already given to
it, so a verdict arrives late; it is not waited for. A single one may be bad luck. After ``PATIENCE`` in a row nothing
will change any more, since the weights do not: ``step`` then raises an error that names the first gradient of backward
that was not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from strategies.engine.bucket_state import Scale
from strategies.engine.transfer.transfer import Transfer

logger = logging.getLogger(__name__)
PATIENCE = 3  # skipped steps in a row


class NonFiniteError(RuntimeError):
    """Gradients were not finite in several steps in a row, and nothing was learned.

    ``steps_ago`` counts the steps since the first of them; ``parameter`` had the first such gradient of backward.
    """

    def __init__(self, steps_ago: int, parameter: str | None) -> None:
        self.steps_ago, self.parameter = steps_ago, parameter
        whose = f"the gradient of {parameter}" if parameter else "a gradient"
        super().__init__(f"{PATIENCE} steps in a row were skipped: {whose} is not finite")


@dataclass(frozen=True, slots=True)
class Norms:
    """The norm of each gradient of a step, by name, in the order of backward."""

    names: Sequence[str]
    values: Sequence[Tensor]

    def first_bad(self) -> str | None:
        """Whose gradient was not finite first."""
        named = zip(self.names, self.values, strict=True)
        return next((name for name, value in named if not bool(value.isfinite())), None)


class SkippedSteps:
    """Collects what is known about each step."""

    def __init__(self, transfer: Transfer) -> None:
        self.skipped = 0
        self._transfer = transfer
        self._waiting: list[tuple[Scale, Norms]] = []
        self._in_a_row: list[Norms] = []

    def add(self, scale: Scale, norms: Norms) -> None:
        """One more step was made."""
        self._waiting.append((scale, norms))

    def look(self) -> None:
        """Say which steps were skipped, of those that are known without waiting."""
        while self._waiting and self._transfer.done(self._waiting[0][0].known):
            scale, norms = self._waiting.pop(0)
            if not scale.skips:
                self._in_a_row.clear()
                continue
            self.skipped += 1
            self._in_a_row.append(norms)
            logger.warning("a gradient was not finite: this step was skipped (%d so far)", self.skipped)

    def refuse(self) -> None:
        """Do nothing while steps change something.

        Raises:
            NonFiniteError: the last ``PATIENCE`` steps that are known were skipped.
        """
        self.look()
        if len(self._in_a_row) >= PATIENCE:
            raise NonFiniteError(len(self._in_a_row) + len(self._waiting), self._in_a_row[0].first_bad())
