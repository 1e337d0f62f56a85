"""Pruned weights: which ones go, and that they stay zero through every update, of torch's optimizers and of the engine.

Invariant. Of a pruned parameter, what is exactly zero before an update is zero after it. The mask is the zeros of the
weights: of the fp32 masters, where there are any, so that nothing comes back when a weight is rounded from its master.
It is saved and loaded with them and needs no memory of its own, but for a byte per element that is being updated. A
weight that an update brings to exactly zero is pruned from then on. Gradients and moments are those of training without
pruning, as in a loop that multiplies by a mask after each step.

Which weights go is decided on the CPU, one parameter at a time, from its exact values, so that the choice is the same
wherever they rest. Of equal scores the first ones go. Zeros have the lowest score, so a higher sparsity keeps them.

    magnitude   |W|, among all weights of a matrix (Zhu and Gupta, arXiv 1710.01878)
    wanda       |W| times the Euclidean norm of its input channel, among the weights of one output (arXiv 2306.11695)
    2:4         |W|, the two smallest of each four consecutive ones along the input, as torch's semi-structured format

Refused: parameters that ranks share, of which none has all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.engine.optimizer import StowOptimizer
from deepstow.strategies.engine.updating.optim import zeros_stay


def keep_zeros(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    """From now on, updates of ``optimizer`` leave the zeros of ``params`` zero."""
    if isinstance(optimizer, StowOptimizer):
        for bucket, index in (optimizer.engine.bucket_of[id(param)] for param in params):
            bucket.keep_zeros(index)
        return
    during = ExitStack()

    def before(*_: Any) -> None:
        during.enter_context(zeros_stay(params))

    def after(*_: Any) -> None:
        during.close()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def exact(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Tensor:
    """A copy on the CPU of what updates of ``param`` start from: its master, or where there is none its weight."""
    if not isinstance(optimizer, StowOptimizer):
        return param.detach().to("cpu", copy=True)
    optimizer.drain()
    newest, is_mixed = optimizer.access.newest_of(param), optimizer.engine.bucket_of[id(param)][0].spec.low_precision
    return (optimizer.state_of(param)["master"] if is_mixed else newest).to("cpu", copy=True)


@torch.no_grad()
def replace(optimizer: torch.optim.Optimizer, param: nn.Parameter, value: Tensor) -> None:
    """Make ``value`` what updates of ``param`` start from, and round its weight from it."""
    if not isinstance(optimizer, StowOptimizer):
        param.copy_(value)
    elif optimizer.engine.bucket_of[id(param)][0].spec.low_precision:
        optimizer.access.set_state(param, {"master": value})
    else:
        optimizer.access.set_weight(param, value)


def chosen(weight: Tensor, method: str, sparsity: float, norms: Tensor | None = None) -> Tensor:
    """Which elements of ``weight`` [outputs, inputs] go, as a bool of its shape. ``norms`` [inputs], for wanda: of each
    input channel.
    """
    scores = weight.abs()
    if method == "wanda":
        assert norms is not None
        rows = scores.mul_(norms)
    else:
        rows = scores.reshape(-1, 4) if method == "2:4" else scores.reshape(1, -1)
    return smallest(rows, round(sparsity * rows.shape[1])).reshape(weight.shape)


def smallest(scores: Tensor, count: int) -> Tensor:
    """Marks the ``count`` smallest of each row, of equal ones the first: [rows, n] -> bool [rows, n]."""
    if count == 0:
        return scores < 0
    limit = scores.kthvalue(count, dim=1, keepdim=True).values
    below, equal = scores < limit, scores == limit
    missing = count - below.sum(1, keepdim=True)
    return below | (equal & (equal.cumsum(1) <= missing))
