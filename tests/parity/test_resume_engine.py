"""Saved under one layout, loaded under another, trained on: the bits of a run that was never interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies.engine import SGD, AdamW, StowOptimizer, stow
from strategies.engine.transfer.transfer import Transfer
from tests.helpers.engine import DECAY, LR, Batches, Result, differences, groups_of, plan_of
from tests.helpers.models import build, tokens
from tests.helpers.sides import CPU, ground

BEFORE, AFTER = 2, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "device": {"site": "device", "bucket": "one"},
    "device, travelling": {"site": "device", "weights": "travelling", "bucket": "half", "prefetch": 2},
    "host, travelling": {"site": "host", "weights": "travelling", "prefetch": 1, "park": "host"},
    "host, resident": {"site": "host", "bucket": "several"},
    "streamed": {"site": "streamed", "weights": "travelling", "prefetch": 2, "bucket": "half", "park": "host"},
    "mixed": {"site": "mixed", "weights": "some", "prefetch": 1, "bucket": "several"},
}
NAMES = list(LAYOUTS)
CASES = [
    pytest.param(
        one, NAMES[(index + 1 + 2 * (index % 2)) % len(NAMES)], (torch.float32, torch.bfloat16)[index % 2], id=one
    )
    for index, one in enumerate(NAMES)
]


def begin(kind: str, dtype: torch.dtype, layout: str, clip: float = 1.0) -> tuple[nn.Module, StowOptimizer]:
    model = build(kind, dtype=dtype)
    return model, stowed(model, layout, clip)


def stowed(model: nn.Module, layout: str, clip: float = 1.0, transfer: Transfer | None = None) -> StowOptimizer:
    plan: Any = plan_of(model, groups=2, max_norm=clip, **LAYOUTS[layout])
    rule = AdamW(lr=LR, weight_decay=DECAY)
    return stow(ground.feed(model), plan, groups_of(model, 2), rule, device=ground.device, transfer=transfer)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def steps(model: nn.Module, optimizer: StowOptimizer, scheduler: Any, batches: Batches, result: Result) -> None:
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        result.losses.append(loss.item())
        result.norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def left(model: nn.Module, optimizer: StowOptimizer, result: Result) -> Result:
    for name, weight in model.state_dict().items():
        result.tensors[name] = weight.detach().to(CPU, copy=True)
    for name, param in model.named_parameters():
        if param.requires_grad:
            state = optimizer.state_of(param)
            result.tensors |= {f"{name} {key}": value.to(CPU, copy=True) for key, value in state.items()}
    return result


@pytest.mark.parametrize(("first", "second", "dtype"), CASES)
def test_resumed_under_another_layout(first: str, second: str, dtype: torch.dtype, tmp_path: Path) -> None:
    batches = tokens("llama", BEFORE + AFTER)
    model, optimizer = begin("llama", dtype, first)
    scheduler, whole = schedule(optimizer), Result()
    steps(model, optimizer, scheduler, batches[:BEFORE], whole)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    optimizer.save(tmp_path / "optimizer")
    counts = scheduler.state_dict()
    whole.losses, whole.norms = [], []
    steps(model, optimizer, scheduler, batches[BEFORE:], whole)
    left(model, optimizer, whole)

    fresh = type(model).from_pretrained(tmp_path / "model", dtype=dtype).train()  # type: ignore[attr-defined]
    fresh.to(dtype)  # as the first one was made: tables of positions, too
    resumed, result = stowed(fresh, second, transfer=ground.transfer()), Result()
    again = schedule(resumed)
    resumed.load(tmp_path / "optimizer")
    again.load_state_dict(counts)
    assert [group["initial_lr"] for group in resumed.param_groups] == [LR, LR / 3]
    if dtype is torch.bfloat16:
        for name, param in fresh.named_parameters():
            assert torch.equal(fresh.state_dict()[name].cpu(), resumed.state_of(param)["master"].bfloat16().cpu())
    steps(fresh, resumed, again, batches[BEFORE:], result)
    assert differences(whole, left(fresh, resumed, result)) == []


def test_a_parameter_without_gradient_stays_uncounted(tmp_path: Path) -> None:
    """Experts that no token chose have no state in the files, and the counts differ from one parameter to the next."""
    batches = tokens("experts", 4)
    model, optimizer = begin("experts", torch.float32, "host, travelling")
    whole = Result()
    steps(model, optimizer, schedule(optimizer), batches[:1], whole)
    optimizer.save(tmp_path / "optimizer")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = left(model, optimizer, Result())
    counts = {int(value) for name, value in expected.tensors.items() if name.endswith(" step")}
    assert counts == {0, 1}
    fresh, resumed = begin("experts", torch.float32, "mixed")
    steps(fresh, resumed, schedule(resumed), batches[1:3], Result())  # so that there is something to overwrite
    fresh.load_state_dict(weights)
    resumed.load(tmp_path / "optimizer")
    assert differences(expected, left(fresh, resumed, Result())) == []


def test_a_rule_without_state(tmp_path: Path) -> None:
    def begun(layout: str) -> tuple[nn.Module, StowOptimizer]:
        model = build("llama", dtype=torch.bfloat16)
        plan: Any = plan_of(model, moments=0, **LAYOUTS[layout])
        return model, stow(ground.feed(model), plan, rule=SGD(lr=0.5), device=ground.device)

    model, optimizer = begun("host, travelling")
    for batch in tokens("llama", 2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(tmp_path / "optimizer")
    other, loaded = begun("streamed")
    loaded.load(tmp_path / "optimizer")
    assert differences(left(model, optimizer, Result()), left(other, loaded, Result())) == []
