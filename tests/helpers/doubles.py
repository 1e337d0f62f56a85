"""Transfers that take the engine at its word."""

from __future__ import annotations

import math

from torch import Tensor

from strategies.engine.transfer.transfer import Delayed, Event


class Vacant(Delayed):
    """A home is NaN from the moment it is given up, and it is given up as soon as it is left.

    ``Delayed`` brings the next tenant as late as it may, so that a reader who comes after the border often finds the
    old bytes still there. Nobody finds anything here.
    """

    eager = True

    def vacated(self, home: Tensor, *after: Event | None) -> None:
        self.host_wait(*after)
        home.fill_(math.nan)
