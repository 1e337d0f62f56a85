"""What runs inside leaves no trace in objects and random numbers."""

import os
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from deepstow.trainer.model.undisturbed import ForkError, in_fork, undisturbed


class Thing:
    def __init__(self) -> None:
        self.count, self.rows, self.names = 0, [1], {"a"}
        self.metrics: dict[str, Any] = {"train": {"loss": [1.0]}}
        self.metrics["itself"] = self.metrics
        self.numbers = [torch.Generator().manual_seed(1), random.Random(1), numpy.random.default_rng(1)]
        self.torch, self.python, self.numpy, self.old = *self.numbers, numpy.random.RandomState(1)

    def draw(self) -> list[float]:
        return [
            float(torch.rand((), generator=self.torch)), self.python.random(), self.numpy.random(), self.old.rand(),
            float(torch.rand(())), random.random(), float(numpy.random.rand()),
        ]  # fmt: skip


class Helper:
    """What a model or a trainer may hold, and what is called is held by that."""

    def __init__(self) -> None:
        self.thing = Thing()
        self.last, self.counts, self.seen = deque([1], maxlen=1), numpy.zeros(2), torch.zeros(2)
        self.functions = (self._calls(),)

    def _calls(self) -> Callable[[], list[float]]:
        calls, numbers = 0, random.Random(3)

        def call() -> list[float]:
            nonlocal calls
            calls += 1
            self.last.append(2)
            self.counts[0] += 1
            self.seen += 1
            return [calls, numbers.random(), *self.last, *self.counts, *self.seen.tolist(), *self.thing.draw()]

        return call


class Sly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))


def test_attributes_containers_and_generators() -> None:
    thing, module = Thing(), Sly()
    weight, seen = module.inner.weight, module.seen
    with pytest.raises(ZeroDivisionError), undisturbed(thing, module, [1, 2]):
        drawn = thing.draw()
        thing.count, thing.new = 1, 2  # type: ignore[attr-defined]
        thing.rows.append(2)
        thing.names.clear()
        thing.metrics["train"]["loss"].append(2.0)
        del thing.metrics["itself"]
        module.inner.weight = nn.Parameter(torch.zeros(2, 2))
        module.inner.cache = torch.ones(1)
        module.seen = torch.ones(1)
        raise ZeroDivisionError
    assert (thing.count, thing.rows, thing.names, hasattr(thing, "new")) == (0, [1], {"a"}, False)
    assert thing.metrics["train"] == {"loss": [1.0]} and thing.metrics["itself"] is thing.metrics
    assert module.inner.weight is weight and module.seen is seen and not hasattr(module.inner, "cache")
    assert thing.draw() == drawn


def test_at_any_depth() -> None:
    module = Sly()
    module.inner.helpers = [{"one": Helper()}]  # type: ignore[assignment]
    (call,) = module.inner.helpers[0]["one"].functions  # type: ignore[union-attr, index]
    with undisturbed(module):
        first = call()
        assert call() != first
    assert call() == first


# In a fork


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
