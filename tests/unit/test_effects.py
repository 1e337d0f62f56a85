"""What a recomputed block changes, it changes once: each kind of state, against a block that is not recomputed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks

Factor = Callable[[Any, Tensor], Any]


class Block(nn.Module):
    """Its output depends on ``factor``, which may change any of its state, and so does every gradient."""

    last: Tensor | None = None

    def __init__(self, factor: Factor, generator: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.calls, self.generator, self._factor = 0, generator, factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * (1 + self._factor(self, x)))))


def normed(block: Any, x: Tensor) -> Any:
    """The kernel writes running statistics past torch's version counters."""
    return block.norm(x)


def running(block: Any, x: Tensor) -> Any:
    with torch.no_grad():
        block.mean.lerp_(x.mean(0), 0.1)
    return block.mean


def replaced(block: Any, x: Tensor) -> Any:
    block.mean = 0.9 * block.mean + 0.1 * x.detach().mean(0)
    return block.mean


def attribute(block: Any, x: Tensor) -> Any:
    """A tensor that is no buffer, and is not there at first."""
    block.last = x.detach().mean(0) if block.last is None else 0.5 * block.last + x.detach().mean(0)
    return block.last


def counting(block: Any, x: Tensor) -> float:
    block.calls += 1
    return 0.1 * block.calls


class Dropped(Block):
    """Runs or not, by Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.4 else super().forward(x)


def drawing(block: Any, x: Tensor) -> float:
    return float(block.generator.random())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Block(normed),
    "running mean": lambda: Block(running),
    "a buffer replaced": lambda: Block(replaced),
    "an attribute": lambda: Block(attribute),
    "a counter": lambda: Block(counting),
    "torch.Generator": lambda: Block(
        lambda block, x: torch.rand((), generator=block.generator).item(), torch.Generator().manual_seed(3)
    ),
    "random.Random": lambda: Block(drawing, random.Random(3)),
    "numpy Generator": lambda: Block(drawing, np.random.default_rng(3)),
    "global generators": lambda: Dropped(lambda block, x: np.random.rand()),
    "random.SystemRandom, which has no state": lambda: Block(lambda block, x: 0, random.SystemRandom()),
}


def trained(make: Callable[[], nn.Module], kept: tuple[str, ...] | None) -> list[Any]:
    """What three steps leave, with two forwards for each backward; ``kept`` is None: not recomputed."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = nn.Sequential(make(), make())
    if kept is not None:
        checkpoint_blocks(model, {"0": kept, "1": kept})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left: list[Any] = []
    for _ in range(3):
        loss = sum((model(torch.randn(4, 6)) ** 2).mean() for _ in range(2)) + 0.0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.item())
        left += [value.tolist() for value in model.state_dict().values()]
        left += [random.random(), np.random.rand(), float(torch.rand(()))]
    return left


@pytest.mark.parametrize("name", BLOCKS)
def test_it_happens_once(name: str) -> None:
    expected = trained(BLOCKS[name], None)
    assert trained(BLOCKS[name], ()) == expected
    assert trained(BLOCKS[name], ("linear 0",)) == expected


def test_a_graph_that_is_retained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(running))
    checkpoint_blocks(model, {"0": ()})
    loss = model(torch.randn(4, 6)).mean()
    mean = model[0].mean
    state = mean.clone()
    first, second = (torch.autograd.grad(loss, model[0].up.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(mean, state) and model[0].mean is mean


def test_statistics_that_were_frozen_at_first() -> None:
    torch.manual_seed(0)
    plain, model = nn.Sequential(Block(normed)), nn.Sequential(Block(normed))
    model.load_state_dict(plain.state_dict())
    checkpoint_blocks(model, {"0": ()})
    for frozen in (True, False):
        x = torch.randn(4, 6)
        for each in (plain, model):
            each[0].norm.train(not frozen)
            each(x).mean().backward()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


def test_a_write_that_begins_later_is_refused() -> None:
    model = nn.Sequential(Block(lambda block, x: running(block, x) if block.begins else block.mean))
    model[0].begins = False
    checkpoint_blocks(model, {"0": ()})
    model(torch.randn(4, 6)).mean().backward()
    model[0].begins = True
    with pytest.raises(
        RuntimeError, match=r"^0\.mean is written to in forward.*strategies\.recompute\.policy: none.*$"
    ):
        model(torch.randn(4, 6))
