"""Adam's calls of many chunks in one: the bits of torch's own calls, and no need of Python's lock between them."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.engine.updating.optim import Operands, UpdateRule, class_of

CHUNKS, SIZE = 64, 1 << 16


@pytest.fixture
def long_turns() -> Iterator[None]:
    """A thread that has Python's lock keeps it until it calls something that leaves it."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def operands(rule: UpdateRule, *, mixed: bool) -> list[Operands]:
    """Calls of one chunk each and one of three; if ``mixed`` their gradients pass through the same scratch memory."""
    torch.manual_seed(0)
    scratch, calls = torch.empty(SIZE), []
    for some in [[SIZE]] * (CHUNKS - 1) + [[SIZE - 24, 7, 17]]:
        params, grads = (list(torch.randn(SIZE).split(some)) for _ in range(2))
        state = [list(torch.zeros(SIZE).split(some)) for _ in rule.names]
        at_rest = [grad.bfloat16() for grad in grads] if mixed else []
        steps = list(torch.zeros(len(some)).unbind())
        calls.append(Operands(params, list(scratch.split(some)) if mixed else grads, state, steps, at_rest))
    return calls


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind, options", [
    ("AdamW", {"weight_decay": 0.1}), ("AdamW", {"amsgrad": True}), ("Adam", {"betas": (0.8, 0.9)}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "lr": torch.tensor(0.01)}),
])  # fmt: skip
def test_bits_are_those_of_torchs_optimizer(kind: str, options: dict[str, Any], *, mixed: bool) -> None:
    rule = UpdateRule(kind, fused=True, **options)
    calls = operands(rule, mixed=mixed)
    chunks = [(on, at) for on in calls for at in range(len(on.params))]
    plain = [nn.Parameter(on.params[at].clone()) for on, at in chunks]
    optimizer = class_of(kind)(plain, fused=True, **options)
    for factor in (torch.tensor(0.3), None, torch.tensor(0.7)):
        for param, (on, at) in zip(plain, chunks, strict=True):
            grad = (on.at_rest or on.grads)[at].float()
            param.grad = grad.clone() if factor is None else grad * factor
        optimizer.step()
        rule.update_all(calls, rule.defaults(), factor)
        for param, (on, at) in zip(plain, chunks, strict=True):
            assert torch.equal(param, on.params[at])
            assert optimizer.state[param]["step"] == on.steps[at]
            for name, ours in zip(rule.names, on.state, strict=True):
                assert torch.equal(optimizer.state[param][name], ours[at])


@pytest.mark.usefixtures("long_turns")
def test_they_do_not_wait_for_a_thread_that_keeps_pythons_lock() -> None:
    rule = UpdateRule("AdamW", fused=True)
    calls = operands(rule, mixed=True)
    first, last = (calls[at].params[0].numpy() for at in (0, -1))
    changed, group = False, rule.defaults()
    for _ in range(2):  # in which it is compiled
        rule.update_all(calls[:1], group, torch.tensor(0.5))
    before = first[0], last[0]
    worker = threading.Thread(target=rule.update_all, args=(calls, group, torch.tensor(0.5)))
    sys.setswitchinterval(1000.0)
    worker.start()
    while first[0] == before[0]:  # leaves the lock to the worker
        time.sleep(0)
    until_s = time.monotonic() + 10
    while not changed and time.monotonic() < until_s:  # keeps it
        changed = last[0] != before[1]
    worker.join()
    assert changed
