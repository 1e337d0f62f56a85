"""Which steps were skipped because a gradient was not finite, and when to stop.

A skipped step changes nothing. The device finds out while later work has already been launched, and the result is not
waited for, so it is known some steps late. After ``PATIENCE`` in a row no later one will differ, since the weights do
not change: ``step`` then raises. Ranks that train together have to raise it in the same step, whichever device is
faster: they wait for the result, which costs little, since they have just waited for each other's norms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from strategies.engine.buckets.jobs import Scale
from strategies.engine.transfer.transfer import Transfer

logger = logging.getLogger(__name__)
PATIENCE = 3  # skipped steps in a row


class NonFiniteError(RuntimeError):
    """Gradients were not finite in several steps in a row, so that no weight changed. ``steps_ago`` counts the steps
    since the first of them; ``parameter`` had the first such gradient of backward.
    """

    def __init__(self, steps_ago: int, parameter: str | None) -> None:
        self.steps_ago, self.parameter = steps_ago, parameter
        what = f"the gradient of {parameter}" if parameter else "a gradient"
        super().__init__(f"{PATIENCE} steps in a row were skipped: {what} is not finite")


class SkippedSteps:
    """Counts skipped steps as their results become known."""

    def __init__(self, transfer: Transfer, *, among_ranks: bool) -> None:
        self.skipped = 0
        self._transfer, self._among_ranks = transfer, among_ranks
        self._waiting: list[tuple[Scale, Mapping[str, Tensor]]] = []
        self._in_a_row: list[Mapping[str, Tensor]] = []

    def add(self, scale: Scale, norms: Mapping[str, Tensor]) -> None:
        """A step was made with gradients of these ``norms``, by parameter in the order of backward."""
        self._waiting.append((scale, norms))

    def poll(self) -> None:
        """Log which steps were skipped, of those that are known without waiting; of all if ranks train together."""
        while self._waiting and (self._among_ranks or self._transfer.done(self._waiting[0][0].known)):
            scale, norms = self._waiting.pop(0)
            if self._among_ranks:
                self._transfer.host_wait(scale.known)
            if not scale.skips:
                self._in_a_row.clear()
                continue
            self.skipped += 1
            self._in_a_row.append(norms)
            logger.warning("a gradient was not finite: this step was skipped (%d so far)", self.skipped)

    def refuse(self) -> None:
        """Raise NonFiniteError if the last ``PATIENCE`` steps that are known were skipped."""
        self.poll()
        if len(self._in_a_row) >= PATIENCE:
            bad = (name for name, norm in self._in_a_row[0].items() if not bool(norm.isfinite()))
            raise NonFiniteError(len(self._in_a_row) + len(self._waiting), next(bad, None))
