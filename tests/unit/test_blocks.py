"""One definition of "block": for every model here, the same modules are counted, hooked, recomputed and timed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.core.facts import UnitKind
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks, checkpointed
from deepstow.strategies.engine.module_hooks import find_scopes
from deepstow.trainer.machine.block_timing import UnitClock
from deepstow.trainer.model.counting import Counter
from deepstow.trainer.model.params import units_by_name
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.engine import differences, plain, stowed
from tests.helpers.models import Odd, Spec, build, odd_batches, tokens
from tests.helpers.tiny import MODELS
from tests.helpers.zoo import FORMS, LORA, branches, hub, text


class Layer(nn.Module):
    """A block with experts in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[1](self.experts[0](x)))


class Stack(nn.Module):
    """Calls ``order``, whatever containers the layers stand in; ``more`` are further attributes."""

    def __init__(self, layers: Any, order: Callable[[Any], list[nn.Module]], **more: Any) -> None:
        super().__init__()
        for name, value in more.items():
            setattr(self, name, value)
        self.layers = layers
        self.head = nn.Linear(4, 4)
        self.order = order

    def forward(self, x: Tensor) -> SimpleNamespace:
        for layer in self.order(self.layers):
            x = layer(x)
        return SimpleNamespace(loss=self.head(x).square().mean())


def several(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


def grouped() -> nn.Module:
    """A bare module that only holds others, as some diffusion models have it."""
    group = nn.Module()
    group.first, group.rest = Layer(), several(1)
    return Stack(nn.ModuleList([group]), lambda groups: [groups[0].first, *groups[0].rest])


def nested() -> nn.Module:
    lists = nn.ModuleList([several(), several()])
    return Stack(lists, lambda lists: [layer for each in lists for layer in each])


def in_dicts() -> nn.Module:
    dicts = nn.ModuleList([nn.ModuleDict({"a": Layer(), "b": nn.Sequential(Layer(), nn.Tanh())})])
    return Stack(dicts, lambda dicts: [*dicts[0].values()])


def shared() -> nn.Module:
    return Stack(nn.ModuleList([Layer()] * 3), list)


def experts_again() -> nn.Module:
    layers = several()
    return Stack(layers, list, experts=nn.ModuleList(e for each in layers for e in each.experts))


def named_in_front() -> nn.Module:
    layers = several()
    return Stack(layers, list, first=layers[0])


STACKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "lists of lists": (nested, [f"layers.{i}.{j}" for i in range(2) for j in range(3)]),
    "lists of dicts": (in_dicts, ["layers.0.a", "layers.0.b"]),
    "lists of groups": (grouped, ["layers.0.first", "layers.0.rest.0"]),
    "one layer thrice": (shared, ["layers.0"]),
    "experts listed again": (experts_again, ["layers.0", "layers.1", "layers.2"]),
    "a further name in front": (named_in_front, ["layers.0", "layers.1", "layers.2"]),
    "some without parameters": (lambda: Stack(nn.ModuleList([nn.Tanh(), Layer()]), list), ["layers.1"]),
}
ZOO: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    **{kind: (lambda kind=kind: build(kind), tokens(kind, 1)[0]) for kind in (*MODELS, "bert", "experts")},
    **{f"form {form}": (lambda form=form: branches(form), text(1)[0]) for form in FORMS},
    **{f"hub {kind}": (lambda kind=kind: hub(kind), text(1)[0]) for kind in ("t5 tied", "switch", "deberta", *LORA)},
    **{name: (make, {"x": torch.ones(2, 4)}) for name, (make, _) in STACKS.items()},
    "odd": (
        lambda: Odd(Spec(width=3, hidden=(1, 3, 17), calls=(0, 2, 1, 0), shares=(1, 0), tied=True)),
        odd_batches(1)[0],
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_all_mean_the_same_modules(name: str) -> None:
    make, batch = ZOO[name]
    model = make()
    blocks = list(find_blocks(model).values())
    assert len(blocks) > 0
    assert name not in STACKS or list(find_blocks(model)) == STACKS[name][1]

    counter = Counter(model)
    with counter:
        model(**batch)
    counted = [unit for unit in counter.units() if unit.kind is UnitKind.BLOCK]
    assert [model.get_submodule(unit.name) for unit in counted] == blocks
    assert all(unit.saved_bytes for unit in counted), "the forward calls each of them"
    inside = {id(param) for block in blocks for param in block.parameters()}
    assert sum(unit.num_params for unit in counted) <= sum(p.numel() for p in model.parameters() if id(p) in inside)
    assert {unit.name for unit in counted} == set(units_by_name(model).values()) - {"embedding", "head"}

    of: Any = {id(param): (mock.Mock(index=index), 0) for index, param in enumerate(model.parameters())}
    assert [scope.module for scope in find_scopes(model, of) if scope.is_block] == blocks

    clock = UnitClock(model, find_blocks(model), torch.device("cpu"))
    with clock.timing():
        model(**batch)
    assert {name for what, name, _ in clock.marks if what == "in"} == {unit.name for unit in counted}

    checkpoint_blocks(model, {unit.name: () for unit in counted})
    assert [module for module in model.modules() if checkpointed(module) is not None] == blocks


@pytest.mark.parametrize("name", ["lists of dicts", "one layer thrice", "a further name in front"])
def test_blocks_in_any_container_train_with_the_bits_of_plain_training(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return STACKS[name][0]()

    batches = [{"x": torch.full((2, 4), 0.1 * number)} for number in range(3)]
    travelling = plan_for(model(), batch=batches[0], max_grad_norm=0.1, site="host", weights="streamed", prefetch=0)
    found = stowed(model(), travelling, batches, max_norm=0.1)
    assert differences(plain(model(), batches, max_norm=0.1), found) == []


def test_further_names_of_a_block_are_the_same_unit() -> None:
    assert units_by_name(named_in_front())["first.experts.0.weight"] == "layers.0"
