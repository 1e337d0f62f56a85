"""Blocks that are alike are counted by three of them, with the numbers of all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.trainer.model import temporaries
from deepstow.trainer.model.stubs import fake_tensors, find_alike, materialise
from deepstow.trainer.planning.facts import ModelCount, count_model
from tests.helpers.marks import slowly
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, run_config

DEPTH = 7
LIKE_THE_SECOND = {f"model.layers.{at}": "model.layers.1" for at in range(2, DEPTH - 1)}
MODELS: Mapping[str, tuple[Mapping[str, Any], dict[str, str]]] = {
    "llama": ({**LLAMA, "num_hidden_layers": DEPTH}, LIKE_THE_SECOND),
    "gpt2": ({**GPT2, "n_layer": DEPTH}, {f"transformer.h.{at}": "transformer.h.1" for at in range(2, DEPTH - 1)}),
    "mixtral": ({**MIXTRAL, "num_hidden_layers": DEPTH}, LIKE_THE_SECOND),
    "every other one has a window": (
        {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 8},
        {"model.layers.4": "model.layers.2", "model.layers.5": "model.layers.3"},
    ),
}
CASES: list[Any] = [
    ("every other one has a window", {}),
    ("gpt2", {"bf16": True}),
    slowly("mixtral", {}),
    slowly("llama", {"gradient_checkpointing": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), CASES, ids=str)
def test_numbers_of_all_blocks(name: str, training: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, expected = MODELS[name]
    asked = run_config(config, per_device_train_batch_size=2, **training)
    seen: list[list[list[str]]] = []
    monkeypatch.setattr(temporaries, "find_alike", lambda model: (seen.append(find_alike(model)), seen[-1])[1])
    found = count_model(asked)
    assert {name: names[1] for names in seen[0] for name in names[2:-1]} == expected
    monkeypatch.setattr(temporaries, "find_alike", lambda model: [])
    every = count_model(asked)
    assert without_forward(found) == without_forward(every)
    # Autocast keeps casts of GPT-2's biases, so that each block's forward has a little more than the one before.
    for unit, other in zip(found.units, every.units, strict=True):
        assert unit.temporaries is not None and other.temporaries is not None
        assert unit.temporaries.forward == pytest.approx(other.temporaries.forward, rel=0.12)


def without_forward(count: ModelCount) -> ModelCount:
    units = (
        replace(unit, temporaries=replace(unit.temporaries, forward=0)) for unit in count.units if unit.temporaries
    )
    return replace(count, units=tuple(units))


class Block(nn.Module):
    """Does what its class says, or what only its closure knows."""

    def __init__(self, number: int, times: int = 1) -> None:
        super().__init__()
        self.number, self.linear, self._hidden = number, nn.Linear(4, 4), [lambda x: x.sin() for _ in range(times)]
        self.ran = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.ran[0] += 1
        for work in self._hidden:
            x = work(x)
        return torch.as_tensor(self.linear(x))


class Model(nn.Module):
    def __init__(self, times: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number, each) for number, each in enumerate(times))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.sum()}


def counted(*times: int) -> tuple[dict[str, int], list[int]]:
    """Saved bytes by block, and which blocks ran at all."""
    with torch.device("meta"):
        model: Any = Model(times)
    with fake_tensors():
        materialise(model)
        x = torch.ones(2, 4, requires_grad=True)
        saved = temporaries.count(model, lambda: model(x)).saved
    return {name: saved.get(name, 0) for name in find_blocks(model)}, [min(1, each.ran[0]) for each in model.layers]


def test_of_blocks_that_are_alike_three_run() -> None:
    saved, ran = counted(1, 1, 1, 1, 1, 1)
    assert ran == [1, 1, 0, 0, 0, 1]
    assert len(set(list(saved.values())[1:])) == 1


def test_blocks_that_only_look_alike_all_run() -> None:
    saved, ran = counted(1, 1, 2, 1, 1, 2)
    assert ran == [1] * 6
    assert saved["layers.2"] == saved["layers.5"] > saved["layers.1"] == saved["layers.4"]
