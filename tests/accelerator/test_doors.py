"""Parity of whatever else people do with a stowed model, on a device that is really asynchronous."""

import pytest

from tests.parity import test_doors, test_model_stays, test_model_trains, test_one_place
from tests.parity.test_doors import *  # noqa: F403
from tests.parity.test_model_stays import *  # noqa: F403
from tests.parity.test_model_trains import *  # noqa: F403
from tests.parity.test_resume_engine import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("there")
# Kinds of device that register with torch have no DLPack: what a state dict shows there shares the arena's storage.
del test_state_dict_copies_nothing  # noqa: F821
TABLES = {**test_doors.SAME, **test_model_stays.SAME, **test_model_trains.SAME}
# Others go the same ways; these take the longest.
CASES = [case for case in TABLES if not case.startswith("not finite") and "inside of present" not in case]


@pytest.mark.parametrize("case", CASES)
def test_the_same(case: str) -> None:
    TABLES[case]()


HOST, STREAMED = ([name for name in test_one_place.LAYOUTS if name.startswith(kind)] for kind in ("host", "streamed"))


@pytest.mark.parametrize("number", range(len(test_one_place.LOOPS)), ids=test_one_place.LOOPS)
def test_weights_that_are_wanted_while_gradients_are_in_their_place(number: int) -> None:
    """Each loop updates once on the host and once on the device; the layouts take turns."""
    for layouts in (HOST, STREAMED):
        test_one_place.compare(list(test_one_place.LOOPS.values())[number], layouts[number % len(layouts)], None)
