"""What plain loops do with weights, gradients and optimizers: it trains to the same bits here, or one line refuses it.

Each case is a loop that runs twice, on a plain model and on a stowed one all of whose blocks travel, under the double
that leaves nothing where a weight was.
"""

import copy
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from deepstow.strategies.engine import AdamW, stow
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import Vacant
from tests.helpers.engine import DECAY, LR
from tests.helpers.models import Block, Net, build
from tests.helpers.sides import BATCHES, Plain, Script, both_sides, copies, refused, stowed, training, unequal

NORM = 1.0
WHERE: dict[str, Any] = {"site": "streamed", "weights": "travelling", "prefetch": 0}
HOW: dict[str, Any] = {"max_norm": NORM, "debug": False}
net = partial(build, Net)


def backward(model: Any, number: int) -> float:
    loss = model(**BATCHES[number]).loss
    loss.backward()
    return float(loss.detach())


def every_step(between: Script | None = None, after: Script | None = None, steps: int = 3) -> Script:
    """An ordinary loop, which clips by torch's function."""

    def clipped(model: Any, optimizer: Any) -> list[Any]:
        seen = between(model, optimizer) if between else None
        return [seen, float(clip_grad_norm_(model.parameters(), NORM))]

    return training(clipped, after, steps)


# --- weights ---------------------------------------------------------------------------------------------------------


class KeepsView(Block):
    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up.weight.view(-1)
        return super().forward(x)


class ReadsKept(Net):
    """The view is used when its block is long over."""

    def __init__(self, block: type[Block] = KeepsView) -> None:
        super().__init__(block)

    def more(self) -> Tensor | float:
        return sum((layer.kept[5:].pow(2).sum() for layer in self.layers), torch.zeros(()))


class HooksInside(Block):
    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            self.kept = self.up(self.norm(out)).pow(2).mean()
        return out


class LateUnderHooks(Net):
    def __init__(self) -> None:
        super().__init__(HooksInside)

    def more(self) -> Tensor:
        return sum((layer.kept for layer in self.layers), torch.zeros(()))


def gradients_of_weights(model: Any, optimizer: Any) -> list[Any]:
    loss = model(**BATCHES[0]).loss
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    loss.backward(inputs=[param for name, param in model.named_parameters() if "up" in name])
    waiting = [name for name, param in model.named_parameters() if param.grad is not None]
    return [grad if grad is None else grad.tolist() for grad in found] + waiting


class Encoder(Net):
    """Torch's own layer, which has a kernel of its own for evaluation."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True))


def evaluated(model: Any, optimizer: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(**BATCHES[7]).loss)
    model.train()
    return loss


# --- gradients -------------------------------------------------------------------------------------------------------


def read_in_the_middle(model: Any, optimizer: Any) -> list[Any]:
    seen: list[Any] = []
    for number in range(4):
        seen.append(backward(model, number))
        seen += [float(param.grad.norm()) for param in model.parameters() if param.grad is not None]
        if number % 2:
            seen.append(float(clip_grad_norm_(model.parameters(), NORM)))
            seen += [float(param.grad.norm()) for param in model.parameters() if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return seen


def step_twice(model: Any, optimizer: Any) -> None:
    backward(model, 0)
    optimizer.step()
    optimizer.step()


def never_zeroed(model: Any, optimizer: Any) -> None:
    for number in range(2):
        backward(model, number)
        optimizer.step()


def zeros_for_none(model: Any, optimizer: Any) -> None:
    backward(model, 0)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    model.layers = model.layers[:2]
    backward(model, 1)
    optimizer.step()


# --- the optimizer ---------------------------------------------------------------------------------------------------


def restored_in_part(model: Any, optimizer: Any) -> list[Any]:
    seen = [every_step(steps=2)(model, optimizer)]
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][3]
    optimizer.load_state_dict(state)
    return [*seen, every_step(steps=2)(model, optimizer)]


def in_place_rate(model: Any, optimizer: Any) -> object:
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(LR)
    return every_step(after=lambda *_: rate.mul_(0.5) and None)(model, optimizer)


# --- one function called with several of the engine's classes at once -------------------------------------------------

KINDS_OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    "weight": lambda weight: weight,
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view": lambda weight: weight.t().t(),
    "gradient": lambda weight: weight.grad,
    "view of a gradient": lambda weight: weight.grad.t().t(),
}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": torch.mul,
    "matmul": lambda one, other: one.t() @ other,
    "cat": lambda one, other: torch.cat([one, other]),
    "foreach": lambda one, other: torch._foreach_mul([one], [other])[0],
    "mse": functional.mse_loss,
    "linear": functional.linear,
}


def pairs(model: Any) -> Iterator[Any]:
    one, other = model.layers[0].up.weight, model.layers[2].up.weight
    for first, second, function in product(KINDS_OF_TENSORS.values(), KINDS_OF_TENSORS.values(), FUNCTIONS.values()):
        yield function(first(one), second(other)).double().sum().item()


class Sly(Net):
    """Counts, draws and caches in forward, of which planning leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.log, self.cache = random.Random(3), [0.0], None
        random.seed(0)

    def more(self) -> Tensor | float:
        noise = self.numbers.random() + random.random()
        self.log.append(self.calls)
        if self.cache is None:
            self.cache = self.embed.weight.detach().sum()
        return noise + self.calls * self.head.bias.sum()


def interrupted(model: Any, optimizer: Any) -> object:
    """Torch calls no hooks of modules for a KeyboardInterrupt, not even those that it calls always."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].up.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        backward(model, 0)
    handle.remove()
    seen = every_step()(model, optimizer)
    assert isinstance(optimizer, Plain) or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return seen


def beside_another(model: Any, optimizer: Any) -> list[Any]:
    """``clip_grad_norm_`` hands torch one list, of which the engine keeps a part."""
    torch.manual_seed(0)
    other = nn.Linear(32, 32)
    (model(**BATCHES[0]).loss + other(torch.ones(32)).pow(2).sum()).backward()
    norm = clip_grad_norm_([*model.parameters(), *other.parameters()], NORM)
    optimizer.step()
    return [norm, other.weight.grad]


def change(name: str, value: Any) -> Script:
    return lambda model, optimizer: optimizer.param_groups[0].__setitem__(name, value)


SAME: dict[str, tuple[Any, ...]] = {
    "a view, read when its block is over": (ReadsKept, every_step()),
    "late nodes under hooks of others": (LateUnderHooks, every_step()),
    "autograd.grad of weights": (Net, gradients_of_weights),
    "torch's encoder, evaluated": (Encoder, every_step(after=evaluated)),
    "gradients read in the middle": (Net, read_in_the_middle, {"accumulation": 2}),
    "state.clear()": (Net, every_step(after=lambda _, optimizer: optimizer.state.clear())),
    "moments set to zero": (
        Net,
        every_step(after=lambda _, o: [state["exp_avg"].zero_() for state in o.state.values()] and None),
    ),
    "a part of the state restored": (Net, restored_in_part),
    "a rate that is changed in place": (Net, in_place_rate),
    "several kinds at once": (Net, every_step(lambda model, _: list(pairs(model)), steps=2)),
    "an interrupt in forward": (Net, interrupted),
    "clipped together with another model": (Net, beside_another),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same(case: str) -> None:
    make, loop, *options = SAME[case]
    how = {"clips": True, **HOW, **(options[0] if options else {})}
    both_sides(partial(build, make), loop, [WHERE], transfer=Vacant, **how)


def test_planning_leaves_no_trace_in_a_model() -> None:
    plain, model = build(Sly), build(Sly)
    plan = plan_for(model, site="streamed", weights="streamed", max_grad_norm=None, batch=BATCHES[0])
    ours = stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device="cpu", transfer=Vacant())
    seen = []
    for side, optimizer in ((plain, Plain(plain, 0.0)), (model, ours)):
        random.seed(0)
        seen.append(training()(side, optimizer))
    assert seen[0] == seen[1] and unequal(copies(plain), copies(model)) == []


def test_torchs_optimizer_goes_on() -> None:
    """With the state of the one that was closed."""
    plain, model = net(), net()
    seen = []
    for side, optimizer in ((plain, Plain(plain, 0.0)), (model, stowed(model, WHERE, transfer=Vacant()))):
        seen.append([training(steps=2)(side, optimizer)])
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        other = torch.optim.AdamW(side.parameters(), lr=LR, fused=True)
        other.load_state_dict(state)
        seen[-1].append(training(steps=2)(side, other))
    assert seen[0] == seen[1] and unequal(copies(plain), copies(model)) == []


# --- refused ---------------------------------------------------------------------------------------------------------


def under_autocast(weight: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (weight @ weight.t()).sum()


class HooksView(KeepsView):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept.register_hook(lambda grad: 2 * grad)
        return out


def hooked_late(model: Any, optimizer: Any) -> None:
    model(**BATCHES[0])
    model.layers[0].kept.register_hook(print)


ONCE = {"max_norm": 0.0, "in_backward": True}


def unscaled(scale: float, model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


REFUSED: dict[str, tuple[Any, ...]] = {
    "hooks on the graph": (
        lambda m, _: torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), print),
        "use param.register_hook",
    ),
    "a hook as gradients are accumulated": (
        lambda m, _: m.head.weight.register_post_accumulate_grad_hook(print),
        "gradients are moved as they are accumulated",
    ),
    "torch.func": (
        lambda m, _: torch.func.grad(lambda x: m.layers[0](x).sum())(torch.zeros(2, 32)),
        "cannot be in torch.func",
    ),
    "a graph of a copy, under autocast": (
        training(lambda m, _: under_autocast(m.layers[1].up.weight)), "read under autocast outside of the module",
    ),
    "a kernel that writes to many": (
        training(lambda m, _: torch.optim.AdamW(m.parameters(), fused=True).step()),
        "_fused_adamw_ on a parameter that is away",
    ),
    "step twice": (step_twice, r"step\(\) took the gradient of"),
    "never zeroed": (never_zeroed, r"step\(\) took the gradient of"),
    "zeros for None": (zeros_for_none, r"layers\.[23].* has a gradient of zero"),
    "an odd loss scale": (training(partial(unscaled, 3.0)), "a stowed model's is a power of two"),
    "a scaler where updates begin in backward": (
        training(partial(unscaled, 4.0)), "GradScaler needs all gradients first", ONCE,
    ),
    "maximize": (training(change("maximize", True)), "maximize = True is not supported"),
    "not fused": (training(change("fused", False)), "fused is False there and True in the rule"),
    "a parameter taken out": (training(lambda _, o: o.param_groups[0]["params"].clear()), "param_groups"),
    "a rate between backward and step": (training(change("lr", 0.5)), "lr of .* was changed", ONCE),
    "evaluated between backward and step": (training(evaluated), "updates have begun", ONCE),
    "read between backward and step": (training(lambda m, _: m.layers[2].up.weight.norm()), "updates have begun", ONCE),
    "not stepped": (training(lambda _, o: o.zero_grad()), "updates have begun", ONCE),
    "more passes than planned": (lambda m, _: [backward(m, 0), backward(m, 1)], "backward pass after the gradients"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    loop, line, *options = REFUSED[case]
    how = {**HOW, **(options[0] if options else {})}
    refused(net, loop, line, WHERE, transfer=Vacant(), **how)


@pytest.mark.parametrize(("block", "loop"), [(HooksView, training()), (KeepsView, hooked_late)])
def test_hooks_on_a_view_that_outlives_its_block(block: type[Block], loop: Script) -> None:
    refused(lambda: ReadsKept(block=block), loop, r"use param\.register_hook", WHERE, transfer=Vacant(), **HOW)


def tied_by_memory(model: Any) -> None:
    model.head.weight.data = model.embed.weight.data


def turned(model: Any) -> None:
    model.layers[0].up.weight = nn.Parameter(torch.zeros(32, 48).t())


def with_alias(model: Any) -> None:
    model.layers[0]._cache = [model.layers[0].up.weight.data[1:]]


MODELS: dict[str, tuple[Callable[[Any], object], str]] = {
    "tied by memory": (tied_by_memory, "embed.weight and head.weight share memory"),
    "turned": (turned, "layers.0.up.weight: its memory is not in order of rows"),
    "an alias": (with_alias, "layers.0.up.weight: layers.0._cache shares its memory"),
    "a hook": (
        lambda model: model.head.weight.register_post_accumulate_grad_hook(print),
        "head.weight: gradients are moved as they are accumulated",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_stowed(case: str) -> None:
    model = net()
    MODELS[case][0](model)
    with pytest.raises(ValueError, match=re.escape(MODELS[case][1])):
        stowed(model, WHERE)
