"""Saved under one layout, loaded under another, trained on: the bits of a run that was never interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.engine import SGD, AdamW, StowOptimizer, UpdateRule, stow
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.state.saved_state import opened
from deepstow.strategies.state.torch_state import plain_state
from tests.helpers.engine import DECAY, LAYOUTS, LR, Batches, groups_of, plan_of
from tests.helpers.models import build, tokens
from tests.helpers.sides import BATCHES, copies, everything, ground, train, unequal

BEFORE, AFTER = 2, 3
CASES = [
    ("device", "host, travelling", torch.float32), ("host, travelling", "streamed", torch.bfloat16),
    ("streamed, travelling", "mixed", torch.float32), ("mixed", "device, travelling", torch.bfloat16),
]  # fmt: skip


def stowed(model: nn.Module, layout: str, transfer: Transfer | None = None) -> StowOptimizer:
    plan: Any = plan_of(model, groups=2, max_norm=1.0, **LAYOUTS[layout])
    rule = AdamW(lr=LR, weight_decay=DECAY)
    return stow(ground.feed(model), plan, groups_of(model, 2), rule, device=ground.device, transfer=transfer)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def steps(model: nn.Module, optimizer: StowOptimizer, scheduler: Any, batches: Batches) -> list[Any]:
    """Losses and norms."""
    return train(model, optimizer, batches, lambda _, its: its.clip_grad_norm_(1.0).item(), lambda *_: scheduler.step())


@pytest.mark.parametrize(("first", "second", "dtype"), CASES)
def test_resumed_under_another_layout(first: str, second: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = build("llama", dtype=dtype)
    optimizer = stowed(model, first)
    scheduler = schedule(optimizer)
    steps(model, optimizer, scheduler, BATCHES[:BEFORE])
    model.save_pretrained(tmp_path / "model")
    optimizer.save(tmp_path / "optimizer")
    counts = scheduler.state_dict()
    whole = steps(model, optimizer, scheduler, BATCHES[BEFORE : BEFORE + AFTER])

    fresh = type(model).from_pretrained(tmp_path / "model", dtype=dtype).train()
    fresh.to(dtype)  # as the first one was made: tables of positions, too
    resumed = stowed(fresh, second, ground.transfer())
    again = schedule(resumed)
    resumed.load(tmp_path / "optimizer")
    again.load_state_dict(counts)
    assert [group["initial_lr"] for group in resumed.param_groups] == [LR, LR / 3]
    if dtype is torch.bfloat16:
        for name, param in fresh.named_parameters():
            assert torch.equal(fresh.state_dict()[name].cpu(), resumed.state_of(param)["master"].bfloat16().cpu())
    assert steps(fresh, resumed, again, BATCHES[BEFORE : BEFORE + AFTER]) == whole
    assert unequal(everything(model, optimizer), everything(fresh, resumed)) == []


def test_a_parameter_without_gradient_stays_uncounted(tmp_path: Path) -> None:
    """Experts that no token chose have no state in the files, and the counts differ from one parameter to the next."""
    batches, model, fresh = tokens("experts", 4), build("experts"), build("experts")
    optimizer, resumed = stowed(model, "host, travelling"), stowed(fresh, "mixed")
    train(model, optimizer, batches[:1])
    optimizer.save(tmp_path / "optimizer")
    weights, expected = copies(model), everything(model, optimizer)
    assert {int(value) for name, value in expected.items() if name.endswith(" step")} == {0, 1}
    train(fresh, resumed, batches[1:3])  # so that there is something to overwrite
    fresh.load_state_dict(weights)
    resumed.load(tmp_path / "optimizer")
    assert unequal(expected, everything(fresh, resumed)) == []


def begun(layout: str, rule: UpdateRule, name: str = "llama") -> tuple[nn.Module, StowOptimizer]:
    model = build(name, dtype=torch.bfloat16)
    plan: Any = plan_of(model, moments=len(rule.names), **LAYOUTS[layout])
    return model, stow(ground.feed(model), plan, rule=rule, device=ground.device)


def test_a_rule_without_state(tmp_path: Path) -> None:
    model, optimizer = begun("host, travelling", SGD(lr=0.5))
    train(model, optimizer, BATCHES[:2])
    optimizer.save(tmp_path / "optimizer")
    other, loaded = begun("streamed", SGD(lr=0.5))
    loaded.load(tmp_path / "optimizer")
    assert unequal(everything(model, optimizer), everything(other, loaded)) == []


def test_momentum_whose_updates_torch_does_not_count(tmp_path: Path) -> None:
    """Taken over from torch's state dict, which has no counts, and saved at once, twice."""
    rule = SGD(lr=0.5, momentum=0.9)
    model, optimizer = begun("host, travelling", rule)
    train(model, optimizer, BATCHES[:2])
    state = optimizer.state_dict()
    theirs = {key: {"momentum_buffer": each["momentum_buffer"].clone()} for key, each in state["state"].items()}
    other, loaded = begun("streamed", rule)
    loaded.load_state_dict({**state, "state": theirs})
    for turn in range(2):
        loaded.save(tmp_path / str(turn))
        other, loaded = begun("mixed", rule)
        loaded.load(tmp_path / str(turn))
    found, wanted = everything(other, loaded), everything(model, optimizer)
    moments = [name for name in wanted if name.endswith("momentum_buffer")]
    assert moments and [name for name in moments if not torch.equal(found[name], wanted[name])] == []


def test_state_that_torch_makes_before_the_first_update(tmp_path: Path) -> None:
    """Adagrad's, of experts that no token chose: plain training goes on with it."""
    model, optimizer = begun("host, travelling", UpdateRule("Adagrad"), "experts")
    train(model, optimizer, tokens("experts", 1))
    optimizer.save(tmp_path)
    alone = build("experts")
    theirs = torch.optim.Adagrad(alone.parameters())
    plain_state(theirs, alone, writes=True).fill(opened(tmp_path))
    assert {int(state["step"]) for state in theirs.state.values()} == {0, 1}
    assert len(theirs.state) == len([*alone.parameters()])
