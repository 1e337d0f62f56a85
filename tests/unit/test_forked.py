"""What is called in a fork uses nothing up here, and fails in one line."""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from trainer.model.forked import ForkError, in_fork


def test_nothing_is_used_up() -> None:
    numbers, counts, last = numpy.random.default_rng(0), numpy.zeros(1), deque([1], maxlen=1)
    calls = iter(range(9))

    def draw() -> list[float]:
        counts[0] += 1
        last.append(next(calls))
        return [numbers.random(), torch.rand(()).item(), float(counts[0]), *last]

    assert in_fork(draw) == draw()


def test_files_are_read_on_where_they_were(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("\n".join(map(str, range(9_000))))
    with (tmp_path / "rows").open() as lines:
        assert [next(lines), next(lines)] == ["0\n", "1\n"]
        ahead = in_fork(lines.readlines)
        assert lines.readlines() == ahead and len(ahead) == 8_998


def test_of_a_view_the_view() -> None:
    large = torch.arange(1 << 16)
    view = in_fork(lambda: large[3:5])
    assert view.tolist() == [3, 4] and view.untyped_storage().nbytes() == 16


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (lambda: lambda: 0, r"(AttributeError|PicklingError): Can't pickle .*"),
        (lambda: os._exit(3), "the process that was forked for it has ended"),
        (lambda: time.sleep(60), "no answer within 0.2 seconds"),
    ],
)
def test_one_line(work: Callable[[], Any], line: str) -> None:
    with pytest.raises(ForkError, match=f"^{line}$"):
        in_fork(work, seconds=0.2 if "no answer" in line else 60.0)
