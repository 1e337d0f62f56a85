"""What a recomputed block changes, it changes once: each kind of state, against a block that is not recomputed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strategies.engine.forward.checkpointing import checkpoint_blocks


class Base(nn.Module):
    """Its output depends on ``factor``, and so does every gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * (1 + self.factor(x)))))

    def factor(self, x: Tensor) -> Any:
        return 0


class Norm(Base):
    """Its kernel writes running statistics past torch's version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def factor(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class Running(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def factor(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.mean


class Replaced(Running):
    def factor(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.mean


class Attribute(Base):
    """A tensor that is no buffer, and is not there at first."""

    last: Tensor | None = None

    def factor(self, x: Tensor) -> Tensor:
        self.last = x.detach().mean(0) if self.last is None else 0.5 * self.last + x.detach().mean(0)
        return self.last


class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def factor(self, x: Tensor) -> float:
        self.calls += 1
        return 0.1 * self.calls


class Drawing(Base):
    """From a generator of its own."""

    def __init__(self, made: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.generator, self._draw = made, draw

    def factor(self, x: Tensor) -> float:
        return float(self._draw(self.generator))


class Dropped(Base):
    """Runs or not, by Python's random numbers; and draws from NumPy's."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.4 else super().forward(x) * np.random.rand()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Norm,
    "running mean": Running,
    "a buffer replaced": Replaced,
    "an attribute": Attribute,
    "a counter": Counting,
    "torch.Generator": lambda: Drawing(torch.Generator().manual_seed(3), lambda made: torch.rand((), generator=made)),
    "random.Random": lambda: Drawing(random.Random(3), lambda made: made.random()),
    "numpy Generator": lambda: Drawing(np.random.default_rng(3), lambda made: made.random()),
    "global generators": Dropped,
    "random.SystemRandom, which has no state": lambda: Drawing(random.SystemRandom(), lambda made: made is not None),
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
    model = nn.Sequential(Running())
    checkpoint_blocks(model, {"0": ()})
    loss = model(torch.randn(4, 6)).mean()
    mean = model[0].mean
    state = mean.clone()
    first, second = (torch.autograd.grad(loss, model[0].up.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(mean, state) and model[0].mean is mean


def test_statistics_that_were_frozen_at_first() -> None:
    torch.manual_seed(0)
    plain, model = nn.Sequential(Norm()), nn.Sequential(Norm())
    model.load_state_dict(plain.state_dict())
    checkpoint_blocks(model, {"0": ()})
    for frozen in (True, False):
        x = torch.randn(4, 6)
        for each in (plain, model):
            each[0].norm.train(not frozen)
            each(x).mean().backward()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


class Late(Running):
    begins = False

    def factor(self, x: Tensor) -> Tensor:
        return super().factor(x) if self.begins else self.mean


def test_a_write_that_begins_later_is_refused() -> None:
    model = nn.Sequential(Late())
    checkpoint_blocks(model, {"0": ()})
    model(torch.randn(4, 6)).mean().backward()
    model[0].begins = True
    with pytest.raises(
        RuntimeError, match=r"^0\.mean is written to in forward.*strategies\.recompute\.policy: none.*$"
    ):
        model(torch.randn(4, 6))
