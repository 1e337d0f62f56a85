"""Every file operation of a run fails, once and for good, with every errno that it can return: ``make faults``.

``tests/faults/test_operations.py`` has one of each kind.
"""

from collections.abc import Iterator

import pytest

from tests.helpers.failing import STARTS, Failing

PARTS = 40  # of hundreds of runs each, so that one can be chosen


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    made = Failing(tmp_path_factory.mktemp("failing"))
    yield made
    made.close()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("start", STARTS)
def test_any_operation_fails(start: str, part: int, failing: Failing) -> None:
    faults = failing.faults(start)[part::PARTS]
    assert faults
    complaints = [line for fault in faults for line in failing.complaints(start, fault)]
    assert not complaints, "\n".join(complaints)
