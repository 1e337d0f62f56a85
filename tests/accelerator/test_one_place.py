"""Weights that are wanted while gradients are in their place, on a device that is really asynchronous.

Each loop updates once on the host and once on the device; the layouts take turns.
"""

import pytest

from tests.parity.test_one_place import LAYOUTS, LOOPS, compare

HOST, STREAMED = ([name for name in LAYOUTS if name.startswith(kind)] for kind in ("host", "streamed"))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("number", range(len(LOOPS)), ids=LOOPS)
def test_loops(number: int) -> None:
    for layouts in (HOST, STREAMED):
        compare(list(LOOPS.values())[number], layouts[number % len(layouts)], None)
