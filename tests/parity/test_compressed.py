"""Compressed exchanges on real ranks: all get the same bits, nothing that is owed is lost, and a run goes on with it.

There is no plain training to be equal to. Of gradients that are known, what was delivered in all steps and what is
still owed must add up to what there was, to rounding in fp32.
"""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepstow.strategies.core.facts import Compression
from deepstow.strategies.plugins.compressed import Compressed
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world

pytestmark = pytest.mark.ranks
METHODS = ("topk", "int8", "powersgd", "topk", "int8", "bf16", "fp16")
SHAPES = ((1,), (3,), (130,), (40, 60), (7, 300), (2, 3, 50), (64, 64))
START, STEPS = 2, 6


class Known(nn.Module):
    """Its gradients are what it is given; a parameter that is given nothing is not used."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, given: list[Tensor | None]) -> Tensor:
        used = [(param * each).sum() for param, each in zip(self.params, given, strict=True) if each is not None]
        return torch.stack(used).sum()


def _cases(ranks: Ranks, seeds: list[int]) -> dict[str, int]:
    for seed in seeds:
        draw = random.Random(seed)
        method, shapes = METHODS[seed % len(METHODS)], draw.choices(SHAPES, k=draw.randint(1, 6))
        density = draw.choice((0.01, 0.2, 1.0))
        model, how = Known(shapes), Compressed(Compression(method, density, draw.choice((1, 2, 4)), START))
        wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=draw.choice((0.005, 1)))
        how.hang_on(wrapped)
        whole = [torch.zeros(shape) for shape in shapes]
        delivered = [torch.zeros(shape) for shape in shapes]
        for step in range(STEPS):
            every = _gradients(draw, shapes, ranks.world_size, step, loses=method == "powersgd")
            wrapped.zero_grad()
            wrapped(every[ranks.rank]).backward()
            for number, param in enumerate(model.params):
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                _same_on_all(grad, f"case {seed}, {method}, step {step}")
                delivered[number] += grad
                parts = [part for each in every if (part := each[number]) is not None]
                whole[number] += torch.stack(parts).sum(0) / ranks.world_size if parts else 0
        for number, (expected, found) in enumerate(zip(whole, delivered, strict=True)):
            scale = float(expected.abs().max()) + 1
            apart = float((found + _owed(how, model, number) - expected).abs().max())
            bound = {"bf16": 2**-6, "fp16": 2**-9}.get(method, 1e-5)
            assert apart <= bound * scale, f"case {seed}, {method}: {apart} of {scale} is lost of {shapes[number]}"
            if method == "topk" and density == 1:
                assert float((found - expected).abs().max()) <= 1e-5 * scale
    return {"cases": len(seeds)}


def _gradients(draw: random.Random, shapes: list[Any], ranks: int, step: int, *, loses: bool) -> list[list[Any]]:
    """Of each rank; some parameters are not used by some ranks, and after the first steps some by none. PowerSGD loses
    what is owed of those."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    nobody = {number for number in range(1, len(shapes)) if draw.random() < 0.2 and step and not loses}
    found: list[list[Any]] = []
    for rank in range(ranks):
        unused = {number for number in range(1, len(shapes)) if draw.random() < 0.2 and not (loses and rank == 0)}
        mine = [torch.randn(shape, generator=generator) * 10 ** draw.uniform(-2, 1) for shape in shapes]
        found.append([None if number in nobody | unused else each for number, each in enumerate(mine)])
    return found


def _same_on_all(tensor: Tensor, what: str) -> None:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in every), f"{what}: ranks have other bits"


def _owed(how: Compressed, model: Known, number: int) -> Tensor:
    """The mean of what all ranks owe of a parameter, and what its owners do."""
    state, name = dict(how._state()) if how.compression.owes else {}, f"params.{number}"
    like, how_many = model.params[number], {key: param.numel() for key, param in model.named_parameters()}
    owed = torch.zeros(like.shape)
    if how.compression.method == "powersgd":
        for index, names in how._buckets.items():
            sizes = [how_many[each] for each in names]
            if name in names and f"error.{index}" in state:
                owed = state[f"error.{index}"].split(sizes)[names.index(name)].clone().view_as(like)
    elif state:
        owed = state[f"{name}.owed"].clone().view_as(like)
    dist.all_reduce(owed)
    owed /= dist.get_world_size()
    if f"{name}.owed as owner" in state:
        mine = state[f"{name}.owed as owner"].contiguous()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        owed += torch.cat(every).view(-1)[: like.numel()].view_as(like)
    return owed


def test_ranks_get_the_same_bits_and_nothing_is_lost() -> None:
    run_world(4, _cases, list(range(400, 425)), deepspeed=False)


def _corrected(ranks: Ranks, momentum: float) -> dict[str, Any]:
    """Top-k with momentum correction of one parameter, and the same written plainly for all ranks."""
    size, density = 60, 0.1
    model, how = Known([(size,)]), Compressed(Compression("topk", density, 1, START, momentum=momentum))
    wrapped = DistributedDataParallel(model)
    how.hang_on(wrapped)
    velocity, owed = torch.zeros(ranks.world_size, size), torch.zeros(ranks.world_size, size)
    for step in range(STEPS):
        every = torch.randn(ranks.world_size, size, generator=torch.Generator().manual_seed(step))
        wrapped.zero_grad()
        wrapped([every[ranks.rank]]).backward()
        if step < START:
            velocity = momentum * velocity + every.mean(0)
            expected = velocity[0]
        else:
            velocity = momentum * velocity + every
            owed += velocity
            sent = torch.zeros_like(owed).scatter(1, owed.abs().topk(int(density * size)).indices, 1.0)
            expected = (owed * sent).mean(0)
            owed, velocity = owed * (1 - sent), velocity * (1 - sent)
        (param,) = model.params
        assert param.grad is not None and torch.allclose(param.grad, expected, rtol=0, atol=1e-6), f"step {step}"
    return {}


def test_momentum_is_of_each_ranks_own_gradients() -> None:
    """To rounding: 1e-6 of numbers of about 1."""
    run_world(2, _corrected, 0.5, deepspeed=False)
