"""1-bit Adam (Tang et al., 2021): after a warm-up ranks exchange signs of their momentum, and variance is frozen.

In the warm-up gradients are averaged, and the optimizer is AdamW. At its end both moments are divided by their bias
corrections, once. From then on each rank adds its own gradient to the momentum that all have in common, and sends it
as a bit for each number, and the mean size of each ``BLOCK``. Owners add, and send on, as for int8, with errors owed on
both sides (``codec_int8.py``). A weight moves by lr m / (sqrt(v) + eps). A bit cannot say zero: an element without a
gradient in the warm-up gets a momentum, and would be divided by nothing; it takes its parameter's mean variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from deepstow.strategies.backends.codec_int8 import Int8
from deepstow.strategies.planner.pipeline_bytes import MESSAGE_BYTES

WEIGHTS = tuple(1 << bit for bit in range(8))
SIGNS = torch.tensor([[1.0 if byte & bit else -1.0 for bit in WEIGHTS] for byte in range(256)])


def encoded(numbers: Tensor) -> Tensor:
    """Bytes of blocks: (..., BLOCK) in fp32 become (..., 4 + BLOCK / 8). Zeros do not count in a block's mean size."""
    scale = numbers.abs().sum(-1, keepdim=True) / (numbers != 0).sum(-1, keepdim=True).clamp(min=1)
    bits = (numbers > 0).to(torch.uint8).unflatten(-1, (-1, 8))
    return torch.cat([scale.view(torch.uint8), (bits * bits.new_tensor(WEIGHTS)).sum(-1, dtype=torch.uint8)], -1)


def decoded(coded: Tensor) -> Tensor:
    """The numbers, in fp32: each is plus or minus its block's scale."""
    return SIGNS.to(coded.device)[coded[..., 4:].int()].flatten(-2) * coded[..., :4].contiguous().view(torch.float32)


class Signs(Int8):
    """As ``Int8``, in a bit."""

    _encoded, _decoded = staticmethod(encoded), staticmethod(decoded)


def batches(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that are exchanged together: as torch's buckets, a message has about ``MESSAGE_BYTES``."""
    some: list[Tensor] = []
    for param in params:
        some.append(param)
        if sum(each.numel() for each in some) * 4 >= MESSAGE_BYTES:
            yield some
            some = []
    yield from [some] if some else []


@torch.no_grad()
def freeze(optimizer: torch.optim.Optimizer) -> None:
    """End the warm-up; a parameter without variance has no state then."""
    for group in optimizer.param_groups:
        for param in [param for param in group["params"] if optimizer.state.get(param)]:
            state = optimizer.state[param]
            for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                state[name].div_(1 - beta ** float(state["step"]))
            variance = state["exp_avg_sq"]
            variance.copy_(variance.where(variance != 0, variance.mean()))
            if not variance.any():
                del optimizer.state[param]


@torch.no_grad()
def step(optimizer: torch.optim.Optimizer, signs: Signs, names: Mapping[int, str]) -> None:
    """A step of the second stage, in place of the optimizer's, which finds no gradients then. Raise RuntimeError if a
    parameter has no variance.
    """
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    every = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    for param in every:
        if not optimizer.state.get(param):
            what = f"{names[id(param)]} had no gradient in the warm-up, so 1-bit Adam knows no variance of it"
            raise RuntimeError(f"{what}; raise strategies.collectives.start")
    for some in batches(every):
        momenta = [optimizer.state[param]["exp_avg"] for param in some]
        for param, momentum in zip(some, momenta, strict=True):
            momentum.lerp_(param.grad, 1 - groups[id(param)]["betas"][0])
        signs.exchange([names[id(param)] for param in some], momenta)
        for param in some:
            group, state = groups[id(param)], optimizer.state[param]
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])
            state["step"] += 1
            param.grad = None
