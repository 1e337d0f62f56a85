"""Parity of whatever else people do with a stowed model, on a device that is really asynchronous."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity import test_doors, test_model_stays, test_model_trains, test_one_place, test_resume_engine
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

pytestmark = pytest.mark.usefixtures("there")
TABLES = {**test_doors.SAME, **test_model_stays.SAME, **test_model_trains.SAME}
# Others go the same ways.
CASES = (
    "a state dict of torch's, and back", "views from before present", "modules that have a say in their state dict",
    "read at every border", "a regularizer", "state dicts at any time",
    "present, updates pending", "load_state_dict", "stopped at the end of backward", "fewer passes than planned",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same(case: str) -> None:
    TABLES[case]()


@pytest.mark.parametrize("number", range(len(test_one_place.LOOPS)), ids=test_one_place.LOOPS)
def test_weights_that_are_wanted_while_gradients_are_in_their_place(number: int) -> None:
    """Loops and layouts take turns."""
    layouts = list(test_one_place.LAYOUTS)
    test_one_place.compare(list(test_one_place.LOOPS.values())[number], layouts[5 * number % len(layouts)], None)


@pytest.mark.parametrize(("first", "second", "dtype"), test_resume_engine.CASES[::3])
def test_resumed_under_another_layout(first: str, second: str, dtype: Any, tmp_path: Path) -> None:
    test_resume_engine.test_resumed_under_another_layout(first, second, dtype, tmp_path)
