"""One torch function called with several of the engine's classes at once; see [Note: several kinds] in functions.py."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from strategies.engine import AdamW, stow
from tests.helpers.doubles import Vacant
from tests.parity.test_right_or_refused import LR, MACHINE, TEXT, Block, Net, backward, every_step, run
from trainer.planning.plan_for import plan_for

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS: dict[str, Callable[[nn.Parameter], Any]] = {
    "weight": lambda weight: weight,
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view": lambda weight: weight.t().t(),
    "gradient": lambda weight: weight.grad,
    "view of a gradient": lambda weight: weight.grad.t().t(),  # type: ignore[union-attr]
}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": torch.mul,
    "matmul": lambda one, other: one.t() @ other,
    "cat": lambda one, other: torch.cat([one, other]),
    "foreach": lambda one, other: torch._foreach_mul([one], [other])[0],
    "mse": functional.mse_loss,
    "linear": functional.linear,
}


def pairs(model: Any, optimizer: Any) -> Iterator[Any]:
    one, other = model.layers[0].up.weight, model.layers[2].up.weight
    for first, second, function in product(KINDS.values(), KINDS.values(), FUNCTIONS.values()):
        yield function(first(one), second(other)).double().sum().item()


def test_each_is_read_as_what_it_stands_for() -> None:
    loop = every_step(lambda model, optimizer: list(pairs(model, optimizer)), steps=2)
    plain, found = run(Net, loop, stowed=False), run(Net, loop, stowed=True)
    assert plain[0] == found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in plain[1].items())


class ReadsBefore(Block):
    """Reads the weight of another block, which is away, together with its own, which is here."""

    others: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        here = self.up.weight.view(-1)
        return super().forward(x) + sum((here * other.up.weight.view(-1)).mean() for other in self.others)


def reading() -> nn.Module:
    model = Net(ReadsBefore)
    model.layers[2].others = (model.layers[0],)  # type: ignore[assignment]
    return model


def test_in_a_block() -> None:
    plain, found = run(reading, every_step(), stowed=False), run(reading, every_step(), stowed=True)
    assert plain[0] == found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in plain[1].items())


def test_a_kernel_that_writes_to_many_is_refused() -> None:
    """Torch's fused optimizer, made anew for a model that is still stowed, would write where the weights were."""

    def loop(model: nn.Module, optimizer: Any) -> list[Any]:
        backward(model, 0)
        torch.optim.AdamW(model.parameters(), fused=True).step()
        return []

    with pytest.raises(RuntimeError, match="_fused_adamw_ on a parameter that is away"):
        run(Net, loop, stowed=True)


def test_gradients_of_two_models_are_clipped_together() -> None:
    """``clip_grad_norm_`` hands torch one list, of which the engine keeps a part."""

    def loop(stowed: bool) -> list[Any]:
        torch.manual_seed(0)
        model, beside = Net(), nn.Linear(32, 32)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        if stowed:
            plan = plan_for(model, machine=MACHINE, site="streamed", weights="streamed", max_grad_norm=1.0)
            optimizer = stow(model, plan, rule=AdamW(lr=LR), device="cpu", transfer=Vacant())
        (model(TEXT[0]) + beside(torch.ones(32)).pow(2).sum()).backward()
        norm = clip_grad_norm_([*model.parameters(), *beside.parameters()], 1.0)
        optimizer.step()
        return [norm, beside.weight.grad, *model.state_dict().values()]

    assert all(torch.equal(one, other) for one, other in zip(loop(False), loop(True), strict=True))
