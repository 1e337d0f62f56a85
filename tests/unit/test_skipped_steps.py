"""Skipped steps: when the result of a step is looked at."""

from typing import Any

import pytest
import torch

from deepstow.strategies.engine.buckets.jobs import Scale
from deepstow.strategies.engine.transfer.transfer import Event, Transfer
from deepstow.strategies.engine.updating.clipping import NonFiniteError, SkippedSteps


class Late(Transfer):
    """A device that is far behind: no event has passed unless somebody waits for it."""

    waited = 0

    def done(self, event: Event | None) -> bool:
        return False

    def host_wait(self, *events: Event | None) -> None:
        self.waited += len(events)


def bad() -> Scale:
    known: Any = None
    return Scale(None, torch.ones(()), torch.ones(2), known)


@pytest.mark.parametrize("among_ranks", [True, False])
def test_ranks_wait_for_the_result_so_that_all_stop_in_the_same_step(among_ranks: bool) -> None:
    transfer = Late()
    steps = SkippedSteps(transfer, among_ranks=among_ranks)
    for _ in range(2):
        steps.add(bad(), {"weight": torch.tensor(float("nan"))})
        steps.refuse()
    steps.add(bad(), {"weight": torch.tensor(float("nan"))})
    if among_ranks:
        with pytest.raises(NonFiniteError, match="the gradient of weight is not finite"):
            steps.refuse()
        assert transfer.waited == 3
    else:
        steps.refuse()
        assert steps.skipped == transfer.waited == 0, "alone nobody waits for the device"
