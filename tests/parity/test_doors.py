"""The ways into a stowed model that libraries use in their own manner: state dicts of both kinds, ``present``."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import build
from tests.helpers.sides import (
    BATCHES,
    LAYOUTS,
    Plain,
    Script,
    everything,
    ground,
    refused,
    same,
    stowed,
    train,
    unequal,
)

llama = partial(build, "llama")

# --- the optimizer's state dict --------------------------------------------------------------------------------------


def other_ids(model: nn.Module, optimizer: Any) -> list[Any]:
    """Saved parameters are ours in the order of their groups, whatever they are called, as in torch's optimizers."""
    losses = train(model, optimizer, BATCHES[:2])
    state, names = copy.deepcopy(optimizer.state_dict()), [name for name, _ in model.named_parameters()]
    state["state"] = {names[index]: value for index, value in reversed(state["state"].items())}
    for group in state["param_groups"]:
        group["params"] = [names[index] for index in group["params"]]
    losses += train(model, optimizer, BATCHES[2:4])
    optimizer.load_state_dict(state)
    return losses + train(model, optimizer, BATCHES[4:6])


def from_plain_and_back(model: nn.Module, optimizer: Any) -> list[Any]:
    """Weights and state of torch's optimizer; and those again, after two steps."""
    other = ground.put(llama())
    plain = Plain(other, 0.0)
    train(other, plain, BATCHES[:2])
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    losses = train(model, optimizer, BATCHES[2:3])
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    losses += train(model, optimizer, BATCHES[4:6])
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return losses + train(model, optimizer, BATCHES[3:4])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda state: state["param_groups"][0]["params"].pop(), "doesn't match the size of optimizer's group"),
        (lambda state: state["state"][3].pop("exp_avg_sq"), "exp_avg_sq missing in the saved state, which has step"),
        (lambda state: state["state"][3].update(exp_avg=torch.ones(1)), r"exp_avg was saved with shape \[1\]"),
    ],
    ids=["one less", "half of it", "another shape"],
)
def test_a_state_dict_of_the_optimizer_that_does_not_fit(spoil: Callable[[Any], object], said: str) -> None:
    model = llama()
    optimizer = stowed(model, "host, one ahead")
    train(model, optimizer, BATCHES[:1])
    before, state = everything(model, optimizer), copy.deepcopy(optimizer.state_dict())
    spoil(state)
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(state)
    assert unequal(before, everything(model, optimizer)) == [] and optimizer.param_groups[0]["lr"] != 7.0


# --- present ---------------------------------------------------------------------------------------------------------


def halved(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


def assigned(model: nn.Module, optimizer: Any) -> list[Any]:
    for param in model.parameters():
        param.data = param.data.clamp(-0.1, 0.1)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())
    return []


def read_after_a_write(model: Any, optimizer: Any) -> list[Any]:
    """By state dicts of both kinds, forward, and a view from before."""
    view = model.model.layers[1].mlp.up_proj.weight.data.t()
    model(**BATCHES[7])
    halved(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    seen = [weights, model(**BATCHES[7]).loss.item(), [param.clone() for param in model.parameters()], view.sum()]
    halved(model)
    return seen


def nested(model: Any, optimizer: Any) -> list[Any]:
    block = model.model.layers[1]
    with optimizer.present([*block.parameters(), *block.parameters()]):
        halved(block)
    seen = [param.clone() for param in block.parameters()]
    halved(block)
    return seen


def gradients(model: Any, optimizer: Any) -> list[Any]:
    with torch.enable_grad():
        model(**BATCHES[6]).loss.backward()
    halved(model)
    return [(param.grad * param).sum().item() for param in model.parameters()]


INSIDE = [assigned, read_after_a_write, nested, gradients]


def inside_present(inside: Script) -> Script:
    """Weights are plain there."""

    def script(model: nn.Module, optimizer: Any) -> list[Any]:
        seen = [*train(model, optimizer, BATCHES[:2])]
        with optimizer.present(model.parameters()), torch.no_grad():
            seen.append(inside(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        return seen + train(model, optimizer, BATCHES[2:4])

    return script


def views_from_before(model: nn.Module, optimizer: Any) -> list[Any]:
    """They show what is written inside, in the middle of a block, too, and with those of another class."""
    views, seen = list[Any](), list[Any]()
    up, norm = (model.get_submodule(f"model.layers.1.{name}") for name in ("mlp.up_proj", "input_layernorm"))
    hook = up.register_forward_hook(lambda *_: views.extend([up.weight.view(-1), norm.weight.view(-1)]))
    train(model, optimizer, BATCHES[:1])
    hook.remove()

    def look(*_: Any) -> None:
        seen.extend([views[0].sum().item(), torch.cat([*views[:2], up.weight.view(-1)]).sum().item()])

    hook = up.register_forward_hook(look)
    for shown in (model, up):
        with optimizer.present(shown.parameters()), torch.no_grad():
            halved(shown)
            look()
            model(**BATCHES[7])
    hook.remove()
    return seen + train(model, optimizer, BATCHES[1:3])


def a_graph_from_before(model: nn.Module, optimizer: Any) -> list[Any]:
    """It goes on where weights were only read, and is refused where they were written to, as elsewhere."""
    losses = train(model, optimizer, BATCHES[:1])
    loss = model(**BATCHES[1]).loss
    with optimizer.present(model.parameters()):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = model(**BATCHES[1]).loss
    with optimizer.present(model.parameters()), torch.no_grad():
        halved(model)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|updated since"):
            loss.backward()
    optimizer.zero_grad()
    return losses + train(model, optimizer, BATCHES[2:4])


@pytest.mark.parametrize("call", ["step", "close"])
def test_what_present_refuses(call: str) -> None:
    model = llama()
    optimizer = stowed(model, "host, one ahead")
    train(model, optimizer, BATCHES[:1])
    before = everything(model, optimizer)
    with optimizer.present(model.parameters()):
        model(**BATCHES[1]).loss.backward()
        with pytest.raises(RuntimeError, match=rf"^{call}\(\) inside of `with optimizer.present\(...\)`: leave the"):
            getattr(optimizer, call)()
        with pytest.raises(RuntimeError, match="the memory of a stowed model is planned"):
            next(model.parameters()).data = torch.zeros(3)
    assert unequal(before, everything(model, optimizer)) == []
    optimizer.step()


def test_present_where_the_plan_updates_in_backward() -> None:
    def script(model: nn.Module, optimizer: Any) -> None:
        with optimizer.present(model.parameters()):
            model(**BATCHES[1]).loss.backward()

    refused(llama, script, r"backward inside of .* and the plan updates there", in_backward=True)


def test_masters_follow_what_is_loaded_inside_present() -> None:
    """The state of an optimizer has masters in it; what they make of weights is seen at once, and keeps its bits."""
    for layout in LAYOUTS:
        model = build("llama", dtype=torch.bfloat16)
        optimizer = stowed(model, layout)
        param = model.get_parameter("model.layers.2.mlp.up_proj.weight")
        train(model, optimizer, BATCHES[:1])
        state, master = copy.deepcopy(optimizer.state_dict()), optimizer.state_of(param)["master"].clone()
        with optimizer.present([param]):
            pass
        assert torch.equal(optimizer.state_of(param)["master"], master), "looking rounds nothing"
        with optimizer.present([param]), torch.no_grad():
            param.fill_(0.5)
            assert (optimizer.state_of(param)["master"] == 0.5).all()
            optimizer.load_state_dict(state)
            assert torch.equal(param.cpu(), master.bfloat16().cpu())
        assert torch.equal(optimizer.state_of(param)["master"], master)
        optimizer.close()


# --- modules that have a say in their state dict ----------------------------------------------------------------------


class Turned(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "turned"] = self.weight.detach().t()
        destination[prefix + "most"] = self.weight.detach().abs().max()


class Split(nn.Linear):
    """Splits, casts and renames what was saved of it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_state_dict_post_hook(self._after)

    @staticmethod
    def _after(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "first"], state[prefix + "second"] = state[prefix + "weight"].chunk(2)
        state[prefix + "weight"] = state[prefix + "weight"].bfloat16()
        state[prefix + "kernel"] = state.pop(prefix + "bias")


class Outside(nn.Module):
    """Saves what a module around it owns."""

    def __init__(self, around: list[Any]) -> None:
        super().__init__()
        self.around = around

    def get_extra_state(self) -> Any:
        return self.around[0].own.detach().sum()


def with_a_say() -> nn.Module:
    model: Any = llama()
    for index, kind in enumerate((Turned, Split, nn.Linear, nn.Linear)):
        model.get_submodule(f"model.layers.{index}.mlp").up_proj = kind(32, 64)
    model.lm_head = Split(32, 64)
    around = model.get_submodule("model.layers.2.mlp")
    around.own = nn.Parameter(torch.ones(5))
    around.outside = Outside([around])
    return model


def state_dicts_with_a_say(model: Any, optimizer: Any) -> list[Any]:
    """Training goes on after an error while one is made."""

    def stop(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        raise ZeroDivisionError

    def look(module: Any, prefix: str, keep_vars: bool) -> None:
        seen.append(module.weight.detach().sum().item())
        with torch.no_grad():
            module.bias.clamp_(-0.01, 0.01)

    seen = train(model, optimizer, BATCHES[:1])
    hook = model.get_submodule("model.layers.0.mlp.up_proj").register_state_dict_pre_hook(stop)
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    hook.remove()
    model.get_submodule("model.layers.3.mlp.up_proj").register_state_dict_pre_hook(look)
    for batch in BATCHES[1:3]:
        seen += train(model, optimizer, [batch])
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        assert all(type(value) is torch.Tensor for value in model.state_dict().values())
        assert model.state_dict(keep_vars=True)["lm_head.kernel"] is model.lm_head.bias
    return list(seen)  # which later looks add to


def test_what_is_made_of_copies_does_not_keep_them() -> None:
    """A part that was saved has memory of its own; what was left alone is where it rests."""
    model = with_a_say()
    optimizer = stowed(model, "host, one ahead")
    state = model.state_dict()
    part = state["model.layers.1.mlp.up_proj.first"]
    assert part.untyped_storage().nbytes() == part.nbytes
    bucket, index = optimizer.engine.bucket_of[id(model.get_parameter("model.layers.3.mlp.up_proj.weight"))]
    found = state["model.layers.3.mlp.up_proj.weight"]
    assert found.data_ptr() == bucket.weight_of(index).data_ptr()


SAME: dict[str, Callable[[], None]] = {
    "a state dict with other ids": same(llama, other_ids),
    "a state dict of torch's, and back": same(llama, from_plain_and_back, LAYOUTS),
    **{
        f"{inside.__name__} inside of present": same(llama, inside_present(inside), list(LAYOUTS)[number % 2 :: 2])
        for number, inside in enumerate(INSIDE)
    },
    "views from before present": same(llama, views_from_before, LAYOUTS),
    "a graph from before present": same(llama, a_graph_from_before, LAYOUTS),
    "modules that have a say in their state dict": same(with_a_say, state_dicts_with_a_say, LAYOUTS),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same(case: str) -> None:
    SAME[case]()
