"""Parity of whatever else people do with a stowed model, on a device that is really asynchronous."""

from collections.abc import Iterator

import pytest
import torch

from strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.helpers import sides
from tests.parity.conftest import one_thread  # noqa: F401
from tests.parity.test_doors import *  # noqa: F403
from tests.parity.test_model_stays import *  # noqa: F403
from tests.parity.test_model_trains import *  # noqa: F403
from tests.parity.test_resume_engine import *  # noqa: F403

# Kinds of device that register with torch have no DLPack: what a state dict shows there shares the arena's storage.
del test_state_dict_copies_nothing  # noqa: F821
# Others go the same ways; these take the longest.
del test_inside_present_weights_are_plain, test_a_step_that_is_not_finite_is_skipped  # noqa: F821


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device = torch.device("sim", 0)
    monkeypatch.setattr(sides.ground, "device", device)
    monkeypatch.setattr(sides.ground, "transfer", lambda: AcceleratorTransfer(device))
    monkeypatch.setattr(sides.ground, "layouts", sides.TWO)  # the others mix what these two do, or move nothing
    yield
