"""Slots that several buckets take in turn: whoever writes one waits for what its last user has left there.

Layouts that the planner does not make, with so few slots that a bucket comes to one where another was a moment ago.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepstow.strategies.core.layout import Layout
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import RaceDetector
from tests.helpers.engine import Made, differences, groups_of, plain, plan_of, stowed
from tests.helpers.models import build, tokens

RESIDENT: dict[str, Any] = {"weights": "resident"}
TRAVELLING: dict[str, Any] = {"weights": "travelling"}


def few(layout: Layout) -> Layout:
    return replace(layout, grad_slots=1)


def taken(layout: Layout) -> Layout:
    """The updates of blocks take the gradients from one slot on the host."""
    buckets = (replace(bucket, grad_taken="layers" in bucket.units[0]) for bucket in layout.buckets)
    return replace(few(layout), buckets=tuple(buckets))


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Layout], Layout]]] = {
    "gradients come back": ("float32", RESIDENT | {"site": "streamed", "park": "host", "visit_slots": 3}, few),
    "gradients are taken": ("float32", TRAVELLING | {"site": "host", "park": "host", "in_backward": True}, taken),
    "new weights are left": ("bfloat16", RESIDENT | {"site": "host", "park": "host", "in_backward": True}, taken),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_plain_training(case: str) -> None:
    name, wished, change = CASES[case]
    dtype: torch.dtype = getattr(torch, name)
    loop: dict[str, Any] = {"max_norm": 0.0 if "in_backward" in wished else 0.05}
    model, batches = build("llama", dtype=dtype), tokens("llama", 3)
    facts = plan_for(model, groups_of(model, 1), batch=(1, 8), max_grad_norm=loop["max_norm"]).facts
    plan = Made.of(change(plan_of(model, **wished, **loop).layout), facts.params)
    expected = plain(build("llama", dtype=dtype), batches, **loop)
    assert differences(expected, stowed(model, plan, batches, transfer=RaceDetector(), **loop)) == []
