"""What plain loops do with weights, gradients and optimizers: it trains to the same bits here, or one line refuses it.

Each case is a loop that runs twice, on a plain model and on a stowed one all of whose blocks travel, under the double
that leaves nothing where a weight was.
"""

import copy
import random
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from strategies.engine import AdamW, stow
from tests.helpers.doubles import Vacant
from trainer.machine.probe import probe
from trainer.planning.plan_for import plan_for

pytestmark = pytest.mark.usefixtures("one_thread")
MACHINE, LR, NORM = probe(), 1e-2, 1.0
Loop = Callable[[nn.Module, Any], list[Any]]
generator = torch.Generator().manual_seed(1)
TEXT = [torch.randint(64, (2, 8), generator=generator) for _ in range(8)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + self.more()

    def more(self) -> Tensor | float:
        return 0.0


def run(make: Callable[[], nn.Module], loop: Loop, stowed: bool, **options: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """What the loop sees, and the weights that it leaves."""
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    if not stowed:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        return loop(model, optimizer), model.state_dict()
    wishes = {"site": "streamed", "weights": "streamed", "prefetch": 0, "max_grad_norm": NORM} | options
    plan = plan_for(model, machine=MACHINE, **wishes)
    assert plan.layout is not None and sum(not bucket.resident for bucket in plan.layout.buckets) >= 3
    optimizer = stow(model, plan, rule=AdamW(lr=LR), device="cpu", transfer=Vacant())
    return loop(model, optimizer), model.state_dict()


def backward(model: nn.Module, number: int) -> float:
    loss = model(TEXT[number])
    loss.backward()
    return float(loss.detach())


def every_step(
    between: Callable[[Any, Any], Any] = lambda model, optimizer: None,
    after: Callable[[Any, Any], Any] = lambda model, optimizer: None,
    clip: bool = True,
    steps: int = 3,
) -> Loop:
    """An ordinary loop; ``between`` backward and step something is done, and ``after`` the step."""

    def loop(model: nn.Module, optimizer: Any) -> list[Any]:
        seen: list[Any] = []
        for number in range(steps):
            seen += [backward(model, number), between(model, optimizer)]
            if clip:
                seen.append(float(clip_grad_norm_(model.parameters(), NORM)))
            optimizer.step()
            seen.append(after(model, optimizer))
            optimizer.zero_grad()
        return seen

    return loop


# --- weights ---------------------------------------------------------------------------------------------------------


class KeepsView(Block):
    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up.weight.view(-1)
        return super().forward(x)


class ReadsKept(Net):
    """The view is used when its block is long over; in one case not before the third step."""

    def __init__(self, since: int = 0, block: type[Block] = KeepsView) -> None:
        super().__init__(block)
        self.since = since

    def more(self) -> Tensor | float:
        if self.calls <= self.since:
            return 0.0
        return sum((layer.kept[5:].pow(2).sum() for layer in self.layers), torch.zeros(()))  # type: ignore[union-attr]


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
        return sum((layer.kept for layer in self.layers), torch.zeros(()))  # type: ignore[misc]


class Surroundings(nn.Module):
    """Has a weight of its own, and hands on what its last block makes, or what each of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.position = nn.ModuleList(Block() for _ in range(4)), nn.Parameter(torch.ones(8, 32))

    def forward(self, x: Tensor, depth: int) -> list[Tensor]:
        made = [x + self.position]
        for layer in list(self.layers)[:depth]:
            made.append(layer(made[-1]))
        return made if depth == 2 else made[-1:]


class EarlyExit(Net):
    """Guards are gone after two steps that are alike; then another block is the last."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.inner = Surroundings()

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        made = self.inner(self.embed(ids), (4, 4, 3, 2, 4, 2)[self.calls - 1])
        return sum((cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) for x in made), torch.zeros(()))


def a_hook_that_keeps_weights(model: nn.Module, optimizer: Any) -> list[Any]:
    kept: list[Tensor] = []
    for layer in model.layers:  # type: ignore[union-attr]
        layer.up.register_forward_hook(lambda module, *_: kept.extend([module.weight.detach(), module.weight.data]))
    model(TEXT[0])
    return [float(weight.norm()) for weight in kept]


def gradients_of_weights(model: nn.Module, optimizer: Any) -> list[Any]:
    loss = model(TEXT[0])
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    loss.backward(inputs=[param for name, param in model.named_parameters() if "up" in name])
    waiting = [name for name, param in model.named_parameters() if param.grad is not None]
    return [grad if grad is None else grad.tolist() for grad in found] + waiting


class Encoder(nn.Module):
    """Torch's own layer, which has a kernel of its own for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True) for _ in range(3))
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def evaluated(model: nn.Module, optimizer: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(TEXT[7]))
    model.train()
    return loss


# --- gradients -------------------------------------------------------------------------------------------------------


def read_in_the_middle(model: nn.Module, optimizer: Any) -> list[Any]:
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


def half(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad *= 0.5  # type: ignore[operator]


def clipped_in_two_groups(model: nn.Module, optimizer: Any) -> None:
    params = list(model.parameters())
    for some in (params[:5], params[5:]):
        clip_grad_norm_(some, NORM / 10)


def step_twice(model: nn.Module, optimizer: Any) -> None:
    backward(model, 0)
    optimizer.step()
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: Any) -> None:
    for number in range(2):
        backward(model, number)
        optimizer.step()


def zeros_for_none(model: nn.Module, optimizer: Any) -> None:
    backward(model, 0)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    model.layers = model.layers[:2]  # type: ignore[index]
    backward(model, 1)
    optimizer.step()


# --- the optimizer ---------------------------------------------------------------------------------------------------


def restored(what: Callable[[dict[str, Any]], None]) -> Loop:
    def loop(model: nn.Module, optimizer: Any) -> list[Any]:
        seen = every_step(steps=2)(model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        what(state["state"])
        optimizer.load_state_dict(state)
        return seen + every_step(steps=2)(model, optimizer)

    return loop


def in_place_rate(model: nn.Module, optimizer: Any) -> list[Any]:
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(LR)
    return every_step(after=lambda *_: rate.mul_(0.5) and None)(model, optimizer)


def taken_elsewhere(model: nn.Module, optimizer: Any) -> list[Any]:
    """Torch's own optimizer goes on with the state."""
    seen = every_step(steps=2)(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    if hasattr(optimizer, "close"):
        optimizer.close()
    other = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    other.load_state_dict(state)
    return seen + every_step(steps=2)(model, other)


# --- one function called with several of the engine's classes at once: [Note: several kinds] in functions.py ----------

KINDS_OF_TENSORS: dict[str, Callable[[nn.Parameter], Any]] = {
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
    for first, second, function in product(KINDS_OF_TENSORS.values(), KINDS_OF_TENSORS.values(), FUNCTIONS.values()):
        yield function(first(one), second(other)).double().sum().item()


class ReadsBefore(Block):
    """Reads the weight of another block, which is away, together with its own, which is here."""

    others: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        here = self.up.weight.view(-1)
        both = (here.view(48, 32) * self.up.weight).mean()  # of a view and of the weight itself
        return super().forward(x) + both + sum((here * other.up.weight.view(-1)).mean() for other in self.others)


def reading() -> nn.Module:
    model = Net(ReadsBefore)
    model.layers[2].others = (model.layers[0],)  # type: ignore[assignment]
    return model


def change(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, optimizer: optimizer.param_groups[0].__setitem__(name, value)


SAME: dict[str, tuple[Any, ...]] = {
    "a view, read when its block is over": (ReadsKept, every_step()),
    "a view, from the third step on": (lambda: ReadsKept(2), every_step(steps=4)),
    "a node that ends a block and what is around it": (EarlyExit, every_step(steps=6)),
    "late nodes under hooks of others": (LateUnderHooks, every_step()),
    "a hook that keeps weights": (Net, a_hook_that_keeps_weights),
    "autograd.grad of weights": (Net, gradients_of_weights),
    "torch's encoder, evaluated": (Encoder, every_step(after=evaluated)),
    "gradients read in the middle": (Net, read_in_the_middle, {"accumulation": 2}),
    "param.grad.data.norm()": (Net, every_step(lambda m, _: [float(p.grad.data.norm(2)) for p in m.parameters()])),
    "param.grad *= 0.5": (Net, every_step(half, clip=False), {"max_grad_norm": NORM}),
    "state.clear()": (Net, every_step(after=lambda _, optimizer: optimizer.state.clear())),
    "state.pop()": (Net, every_step(after=lambda m, optimizer: optimizer.state.pop(m.head.weight) and None)),
    "moments set to zero": (
        Net,
        every_step(after=lambda _, o: [state["exp_avg"].zero_() for state in o.state.values()] and None),
    ),
    "an empty state restored": (Net, restored(lambda state: state.clear())),
    "a part of the state restored": (Net, restored(lambda state: state.pop(3) and None)),
    "a rate that is changed in place": (Net, in_place_rate),
    "torch's optimizer goes on": (Net, taken_elsewhere),
    "several kinds at once": (Net, every_step(lambda model, optimizer: list(pairs(model, optimizer)), steps=2)),
    "several kinds at once, in a block": (reading, every_step()),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same(case: str) -> None:
    make, loop, *options = SAME[case]
    seen, weights = run(make, loop, stowed=False)
    ours, found = run(make, loop, stowed=True, **(options[0] if options else {}))
    assert ours == seen
    assert [name for name, weight in weights.items() if not torch.equal(weight, found[name])] == []


def under_autocast(weight: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (weight @ weight.t()).sum()


class HooksView(KeepsView):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept.register_hook(lambda grad: 2 * grad)
        return out


def hooked_late(model: nn.Module, optimizer: Any) -> None:
    model(TEXT[0])
    model.layers[0].kept.register_hook(print)  # type: ignore[union-attr, index]


ONCE = {"max_grad_norm": 0.0}  # updates begin in backward
REFUSED: dict[str, tuple[Any, ...]] = {
    "weight[:2].zero_()": (every_step(after=lambda m, _: m.layers[1].up.weight.detach()[:2].zero_()), "zero_ on what"),
    "weight.detach().numpy()": (
        every_step(after=lambda m, _: m.layers[1].up.weight.detach().numpy().fill(0)),
        "read-only",
    ),
    "hooks on the graph": (
        lambda m, _: [torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), print)],
        "use param.register_hook",
    ),
    "a hook as gradients are accumulated": (
        lambda m, _: [m.head.weight.register_post_accumulate_grad_hook(print)],
        "gradients are moved as they are accumulated",
    ),
    "assign=True": (lambda m, _: m.load_state_dict(m.state_dict(), assign=True), "copy instead"),
    "torch.func": (
        lambda m, _: torch.func.grad(lambda x: m.layers[0](x).sum())(torch.zeros(2, 32)),
        "cannot be in torch.func",
    ),
    "a graph of a copy, under autocast": (
        every_step(lambda m, _: under_autocast(m.layers[1].up.weight)), "read under autocast outside of the module",
    ),
    "clipped by value": (every_step(lambda m, _: clip_grad_value_(m.parameters(), 1e-3)), "multiplied by one factor"),
    "noise": (every_step(lambda m, _: [p.grad.add_(0.1) for p in m.parameters()]), "multiplied by one factor"),
    "half of them clipped": (
        every_step(lambda m, _: clip_grad_norm_(list(m.parameters())[:5], NORM) and None, clip=False),
        "that of .* with none",
    ),
    "clipped in two groups": (every_step(clipped_in_two_groups, clip=False), "different factors"),
    "clipped twice": (every_step(lambda m, _: clip_grad_norm_(m.parameters(), NORM) and None), "clip once per step"),
    "an assigned gradient": (
        every_step(lambda m, _: setattr(m.head.weight, "grad", torch.zeros(64, 32))), "come from backward only",
    ),
    "a slice of a gradient": (every_step(lambda m, _: m.embed.weight.grad[:10].zero_()), "zero_ on a copy of a gr"),
    "a view of a gradient": (every_step(lambda m, _: m.head.weight.grad.view(-1).mul_(2)), "mul_ on a copy of a gr"),
    "a kernel that writes to many": (
        every_step(lambda m, _: torch.optim.AdamW(m.parameters(), fused=True).step()),
        "_fused_adamw_ on a parameter that is away",
    ),
    "step twice": (step_twice, r"step\(\) took the gradient of"),
    "never zeroed": (never_zeroed, r"step\(\) took the gradient of"),
    "zeros for None": (zeros_for_none, "layers.2.* has a gradient of zero"),
    "a scaler": (every_step(lambda m, _: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad for p in m.parameters()], torch.zeros(1), torch.ones(1))), "does not support GradScaler"),
    "maximize": (every_step(change("maximize", True)), "maximize is not supported"),
    "not fused": (every_step(change("fused", False)), "fused is False there and True in the rule"),
    "a parameter taken out": (every_step(lambda _, o: o.param_groups[0]["params"].clear()), "param_groups"),
    "a rate between backward and step": (every_step(change("lr", 0.5), clip=False), "lr of .* was changed", ONCE),
    "evaluated between backward and step": (every_step(evaluated, clip=False), "updates have begun", ONCE),
    "read between backward and step": (
        every_step(lambda m, _: m.layers[2].up.weight.norm(), clip=False), "updates have begun", ONCE,
    ),
    "not stepped": (every_step(lambda _, o: o.zero_grad(), clip=False), "updates have begun", ONCE),
    "more passes than planned": (lambda m, _: [backward(m, 0), backward(m, 1)], "backward pass after the gradients"),
}  # fmt: skip


@pytest.mark.parametrize(("block", "loop"), [(HooksView, every_step()), (KeepsView, hooked_late)])
def test_hooks_on_a_view_that_outlives_its_block(block: type[Block], loop: Loop) -> None:
    with pytest.raises(RuntimeError, match=r"use param\.register_hook"):
        run(lambda: ReadsKept(block=block), loop, stowed=True)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    loop, line, *options = REFUSED[case]
    with pytest.raises((RuntimeError, ValueError), match=line) as refused:
        run(Net, loop, stowed=True, **(options[0] if options else {}))
    assert "\n" not in str(refused.value)


def tied_by_memory() -> nn.Module:
    model = Net()
    model.head.weight.data = model.embed.weight.data
    return model


def turned() -> nn.Module:
    model = Net()
    model.layers[0].up.weight = nn.Parameter(torch.zeros(32, 48).t())  # type: ignore[union-attr]
    return model


def with_alias() -> nn.Module:
    model = Net()
    model.layers[0]._cache = [model.layers[0].up.weight.data[1:]]  # type: ignore[union-attr, list-item]
    return model


def hooked() -> nn.Module:
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(print)
    return model


MODELS: dict[str, tuple[Any, str]] = {
    "tied by memory": (tied_by_memory, "embed.weight and head.weight share memory"),
    "turned": (turned, "layers.0.up.weight: its memory is not in order of rows"),
    "an alias": (with_alias, "layers.0.up.weight: layers.0._cache shares its memory"),
    "a hook": (hooked, "head.weight: gradients are moved as they are accumulated"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_stowed(case: str) -> None:
    make, line = MODELS[case]
    with pytest.raises(ValueError, match=re.escape(line)):
        run(make, every_step(), stowed=True)


def test_an_interrupt_in_forward_leaves_no_hooks() -> None:
    """Torch calls no hooks of modules for a KeyboardInterrupt, not even those that it calls always."""

    def loop(model: nn.Module, optimizer: Any) -> list[Any]:
        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.layers[1].up.register_forward_hook(stop)  # type: ignore[union-attr, index]
        with pytest.raises(KeyboardInterrupt):
            backward(model, 0)
        handle.remove()
        return every_step()(model, optimizer)

    assert run(Net, loop, stowed=False)[0] == run(Net, loop, stowed=True)[0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Sly(Net):
    """Counts, draws and caches in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.log, self.cache = random.Random(3), [0.0], None

    def more(self) -> Tensor | float:
        noise = self.numbers.random() + random.random()
        self.log.append(self.calls)
        if self.cache is None:
            self.cache = self.embed.weight.detach().sum()  # type: ignore[assignment]
        return noise + self.calls * self.head.bias.sum()


def test_planning_leaves_no_trace_in_a_model() -> None:
    seen, weights = run(Sly, every_step(), stowed=False)
    ours, found = run(Sly, every_step(), stowed=True, batch={"ids": TEXT[0]})
    assert ours == seen
    assert all(torch.equal(weight, found[name]) for name, weight in weights.items())


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
