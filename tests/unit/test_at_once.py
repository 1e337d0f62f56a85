"""Adam's calls of many chunks in one: the bits of torch's own calls."""

from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.engine.updating.optim import Operands, UpdateRule, class_of

CHUNKS, SIZE = 64, 1 << 16


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


@pytest.mark.parametrize("kind, options, mixed", [
    ("AdamW", {"weight_decay": 0.1}, False), ("AdamW", {"amsgrad": True}, True), ("Adam", {"betas": (0.8, 0.9)}, True),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "lr": torch.tensor(0.01)}, False),
])  # fmt: skip
def test_bits_are_those_of_torchs_optimizer(kind: str, options: dict[str, Any], mixed: bool) -> None:
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
