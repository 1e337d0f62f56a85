"""Parity of whatever else people do with a stowed model, on a device that is really asynchronous."""

import pytest

from tests.parity import test_doors, test_model_stays, test_model_trains, test_one_place
from tests.parity.test_doors import test_masters_follow_what_is_loaded_inside_present  # noqa: F401
from tests.parity.test_model_stays import (  # noqa: F401
    test_a_write_into_what_is_here_is_found,
    test_close_gives_a_plain_model_back,
    test_save_pretrained,
)
from tests.parity.test_model_trains import (  # noqa: F401
    test_frozen_weights_take_nothing_but_their_place,
    test_nothing_grows,
)
from tests.parity.test_resume_engine import test_resumed_under_another_layout  # noqa: F401

pytestmark = pytest.mark.usefixtures("there")
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
