"""Schedules, generators and loss scales in a checkpoint: what goes on is what was saved, and damage is one line."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from deepstow.strategies.engine.updating.optim import class_of
from deepstow.strategies.parallel.deepspeed_state import DeepSpeedState
from deepstow.strategies.state import saved_state
from deepstow.strategies.state.saved_state import Weights
from deepstow.strategies.state.spans import WEIGHT, Store
from deepstow.strategies.state.torch_state import Held, Piece, TorchState, plain_state
from deepstow.trainer.run.checkpoints import training_state

# Schedules


def lambda_lr(rate: float = 0.3) -> Any:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": rate / 7}], lr=rate)
    return LambdaLR(optimizer, lambda step: 1 / (3 + step))


def steps(scheduler: Any, count: int) -> list[list[float]]:
    rates = []
    for _ in range(count):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
    return rates


def test_a_function_of_the_step_goes_on(tmp_path: Path) -> None:
    first, second = lambda_lr(), lambda_lr()
    before = steps(first, 5)[-1]
    training_state.save_schedule(tmp_path / training_state.SCHEDULE, first)
    training_state.load_schedule(tmp_path / training_state.SCHEDULE, second, [])
    assert [group["lr"] for group in second.optimizer.param_groups] == second.get_last_lr() == before
    assert steps(second, 4) == steps(first, 4)
    other, undisturbed = lambda_lr(0.5), lambda_lr(0.5)  # another rate is honoured
    training_state.load_schedule(tmp_path / training_state.SCHEDULE, other, [])
    steps(undisturbed, 5)
    assert steps(other, 3) == steps(undisturbed, 3)


def plateau() -> Any:
    return ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), patience=1)


def test_one_with_history_goes_on(tmp_path: Path) -> None:
    first, second = plateau(), plateau()
    for loss in (3.0, 3.0, 3.0, 3.0):
        first.step(loss)
    training_state.save_schedule(tmp_path / training_state.SCHEDULE, first)
    training_state.load_schedule(
        tmp_path / training_state.SCHEDULE, second, [{"lr": first.optimizer.param_groups[0]["lr"]}]
    )
    for loss in (3.0, 3.0, 3.0):
        first.step(loss)
        second.step(loss)
        assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"] < 0.1
    with pytest.raises(ValueError, match="of the schedule LambdaLR, and this run has ReduceLROnPlateau"):
        training_state.save_schedule(tmp_path / training_state.SCHEDULE, lambda_lr())
        training_state.load_schedule(tmp_path / training_state.SCHEDULE, second, [])


def test_a_damaged_schedule(tmp_path: Path) -> None:
    path = tmp_path / training_state.SCHEDULE
    for text in ("", "[]", '{"version": 1, "kind": "LambdaLR", "state": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^[^\n]*{training_state.SCHEDULE}: damaged[^\n]*$"):
            training_state.load_schedule(path, lambda_lr(), [])


# Generators


def draws() -> list[Any]:
    return [random.random(), random.gauss(), np.random.rand(), np.random.standard_normal(), torch.randn(3).tolist()]


def test_generators_go_on(tmp_path: Path) -> None:
    path = tmp_path / "generators.json"
    random.gauss()  # keeps a second number
    np.random.standard_normal()
    training_state.save_generators(path)
    expected = draws()
    assert draws() != expected
    training_state.load_generators(path)
    assert draws() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"python": [3, [-1] * 625, None]},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"torch": "00ff"},
        {"version": 7},
        {"device": ["sim", "00"]},
    ],
    ids=str,
)
def test_damaged_generators_change_nothing(
    tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state: torch.Tensor) -> None:
        raise RuntimeError("RNG state is wrong size")

    path = tmp_path / "generators.json"
    training_state.save_generators(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    monkeypatch.setattr(training_state.accelerator, "kind", lambda: "sim")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(set_rng_state=refuse))
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        draw()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    with pytest.raises(ValueError, match=path.name) as caught:
        training_state.load_generators(path)
    assert len(str(caught.value).splitlines()) == 1
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(torch.random.get_rng_state(), before[2])


# Loss scale


def scaled(overflows: list[bool]) -> tuple[DeepSpeedState, DynamicLossScaler]:
    """DeepSpeed's scaler after steps that overflowed or not."""
    scaler = DynamicLossScaler(
        init_scale=2.0**16, scale_window=3, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    for overflow in overflows:
        scaler.update_scale(overflow)
    state = object.__new__(DeepSpeedState)
    state._outer = SimpleNamespace(loss_scaler=scaler)
    return state, scaler


def test_the_loss_scale_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    saved, first = scaled([False, True, False, False, False, True])
    fresh, second = scaled([])
    found = saved.loss_scale()
    assert found is not None
    fresh.set_loss_scale(json.loads(json.dumps(found)))
    for overflow in (False, False, False, False, True, False, True, True, False, False, False):
        first.update_scale(overflow)
        second.update_scale(overflow)
        assert (first.cur_scale, first.cur_hysteresis) == (second.cur_scale, second.cur_hysteresis)


# A torch optimizer's state in pieces


def trained(
    optim: type, steps: int = 2, turned: bool = False, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 2, bias=False)})
    if turned:
        model["a"].weight.data = model["a"].weight.data.t().contiguous().t()
    optimizer = optim(model.parameters(), lr=0.1, **options)
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * (step + 1 + number))
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optim", "options", "turned"),
    [
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}, True),  # weights of other strides
        (torch.optim.SGD, {"momentum": 0.9}, False),
        (torch.optim.Adagrad, {}, False),
        (class_of("Lion"), {}, False),  # counts in plain numbers
    ],
    ids=["AdamW", "SGD", "Adagrad", "Lion"],
)
def test_every_optimizer(tmp_path: Path, optim: type, options: Any, turned: bool) -> None:
    model, optimizer = trained(optim, turned=turned, **options)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), int):
            state["step"] = float(state["step"])  # as the engine counts
    holder = plain_state(optimizer, model, writes=True)
    weights = holder.weight_spans(set(dict(model.named_parameters())))
    saved_state.write_part(tmp_path, holder, weights, rank=0, ranks=1, hashed=False)
    saved_state.write_index(tmp_path, holder, 1)
    other, fresh = trained(optim, steps=0, turned=turned, **options)
    saved, again = saved_state.opened(tmp_path), plain_state(fresh, other, writes=True)
    assert list(again.misfits(saved)) == []
    again.fill(saved)
    again.fill_weights(Weights(saved.store, None, {}))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and one.stride() == two.stride()
        assert optimizer.state[one].keys() == fresh.state[two].keys()
        for key, value in optimizer.state[one].items():
            if not isinstance(value, torch.Tensor):
                assert value == fresh.state[two][key] and type(fresh.state[two][key]) is int
                continue
            assert torch.equal(value, fresh.state[two][key]) and value.stride() == fresh.state[two][key].stride()
            assert value.dtype is fresh.state[two][key].dtype


def test_one_count_for_pieces_of_one_tensor(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    optimizer.state[model["a"].bias]["step"] += 1  # type: ignore[index]
    holder = plain_state(optimizer, model, writes=True)
    saved_state.write_part(tmp_path, holder, (), rank=0, ranks=1, hashed=False)
    saved_state.write_index(tmp_path, holder, 1)
    flat = nn.Parameter(torch.zeros(30))
    pieces = (
        Piece("a.weight", (5, 3), 0, 0, 15),
        Piece("a.bias", (5,), 0, 15, 5),
        Piece("b.weight", (2, 5), 0, 20, 10),
    )
    shapes = {piece.name: piece.shape for piece in pieces}
    flattened = TorchState(
        torch.optim.AdamW([flat]), [Held(flat, pieces, "float32", copied=True)], [list(shapes)], shapes, []
    )
    lines = list(flattened.misfits(saved_state.opened(tmp_path)))
    assert lines == [
        "a.bias: saved after 3 updates and a.weight after 2; ZeRO counts them together: train on with the strategy "
        "that saved it"
    ]


# The model's files


class Buffered(nn.Module):
    """A weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("made", torch.arange(5), persistent=False)


def test_buffers_are_restored(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": Buffered()})
    assert training_state._needed(model) == {"a.weight": (3,), "a.kept": (4,)}
    assert training_state._absent(tmp_path, model) == {"a.weight", "a.kept"}
    save_file(
        {"a.weight": model["a"].weight.detach() + 1, "a.kept": torch.arange(4) + 7}, tmp_path / "model.safetensors"
    )
    assert training_state._absent(tmp_path, model) == set()
    files = Store.of(training_state._model_files(tmp_path), kind=WEIGHT)
    holder = plain_state(torch.optim.SGD(model.parameters()), model, writes=True)
    training_state._fill_weights(holder, model, Weights(Store({}), files, {}))
    assert model["a"].weight.tolist() == [1, 2, 3] and model["a"].kept.tolist() == [7, 8, 9, 10]


def test_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": Buffered(), "b": Buffered()})
    model["b"].weight = model["a"].weight
    buffers = {"a.kept": torch.arange(4), "b.kept": torch.arange(4)}
    save_file({"b.weight": model["a"].weight.detach(), **buffers}, tmp_path / "model.safetensors")
    assert training_state._absent(tmp_path, model) == set()


def test_files_with_converted_weights_are_not_trusted(tmp_path: Path) -> None:
    """Conversions may keep a name and a shape, and change the values."""
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    model: Any = Buffered()
    model.config = SimpleNamespace(model_type="any")
    model._weight_conversions = []
    save_file({"weight": model.weight.detach(), "kept": torch.arange(4)}, tmp_path / "model.safetensors")
    assert training_state._absent(tmp_path, model) == set()
    model._weight_conversions = [WeightConverter("weight", "weight", operations=[PermuteForRope()])]
    assert training_state._absent(tmp_path, model) == {"weight", "kept"}


@pytest.mark.parametrize("text", ["[]", '{"weight_map": {"a": "../model.safetensors"}}'])
def test_a_damaged_list_of_shards(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="damaged, not a list of the model's files"):
        training_state._model_files(tmp_path)
