"""Models that keep to no borders, two engines at once, memory that runs out, on a device that is asynchronous."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.runtime import AdamW, accelerator, stow
from strategies.runtime.arena import OutOfMemoryError
from strategies.runtime.transfer import AcceleratorTransfer
from tests.helpers.engine import DECAY, LR, STEPS, differences, plain, plan_of, stowed
from tests.helpers.models import build, on, tokens
from tests.helpers.zoo import text
from tests.parity.test_zoo import MACHINE, MODELS, NORM, TRAVEL
from trainer.memory import plan_for

DEVICE = "sim:0"


def there(batches: list[dict[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    return [{name: value.to(DEVICE) for name, value in batch.items()} for batch in batches]


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_that_keep_to_no_borders(make: Callable[[], nn.Module]) -> None:
    batches = there(text(STEPS))
    wanted = plain(on(DEVICE, make()), batches, max_norm=NORM)
    for where, wishes in TRAVEL.items():
        plan = plan_for(make(), max_grad_norm=NORM, machine=MACHINE, debug=True, **wishes)
        moves = AcceleratorTransfer(torch.device(DEVICE))
        found = stowed(make(), plan, batches, max_norm=NORM, transfer=moves, device=DEVICE)
        assert differences(wanted, found) == [], where


def test_two_engines() -> None:
    """In turn, block by block: each has streams and an arena of its own, and the worker's thread knows whose it is."""
    batches = there(tokens("llama", STEPS))
    wanted = [plain(on(DEVICE, build(kind)), batches, max_norm=0.5) for kind in ("llama", "qwen3")]
    rule, sides = AdamW(lr=LR, weight_decay=DECAY), []
    for kind, site in (("llama", "host"), ("qwen3", "streamed")):
        model = build(kind)
        plan: Any = plan_of(model, site=site, weights="travelling", prefetch=1, max_norm=0.5)
        sides.append((model, stow(model, plan, rule=rule)))
    losses: list[list[float]] = [[], []]
    for batch in batches:
        made = [model(**batch).loss for model, _ in sides]
        for loss in reversed(made):
            loss.backward()
        for (_, optimizer), loss, seen in zip(sides, made, losses, strict=True):
            seen.append(loss.item())
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    for (model, optimizer), seen, result in zip(sides, losses, wanted, strict=True):
        assert optimizer.engine.device == torch.device(DEVICE), "the accelerator is taken where nothing is said"
        assert seen == result.losses
        assert all(torch.equal(value.cpu(), result.tensors[name]) for name, value in model.state_dict().items())
        optimizer.close()


def test_memory_is_given_back(device: Any) -> None:
    model = build("llama")
    plan: Any = plan_of(model, site="streamed", weights="travelling")
    torch.accelerator.synchronize()
    before = device.counts()
    optimizer = stow(model, plan, device=DEVICE)
    assert device.counts()["registered"] > before["registered"]
    model(**there(tokens("llama", 1))[0]).loss.backward()
    optimizer.step()
    optimizer.close()
    assert all(param.device.type == "cpu" for param in model.parameters())
    del optimizer, model
    after = device.counts()
    assert after["registered"] == before["registered"]


def test_too_little_memory_is_one_line(device: Any) -> None:
    """And what was registered is not any more, so that the next attempt finds the host's memory free."""
    model = build("llama")
    plan: Any = plan_of(model, site="streamed", weights="travelling")
    before = device.counts()["registered"]
    device.limit(torch.accelerator.memory_allocated() + 4096)
    with pytest.raises(OutOfMemoryError, match=r"the device arena needs .*: simulated device out of memory"):
        stow(model, plan, device=DEVICE)
    device.limit(0)
    stow(model, plan, device=DEVICE).close()
    assert device.counts()["registered"] == before


def test_a_kind_whose_host_memory_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: Any
) -> None:
    """The same bits; the copies are waited for, and that is said."""
    monkeypatch.setitem(accelerator.TABLE, "sim", accelerator.Row())
    batches = there(tokens("llama", STEPS))
    model, before = build("llama"), device.counts()
    plan: Any = plan_of(model, site="host", weights="travelling", max_norm=0.5)
    moves = AcceleratorTransfer(torch.device(DEVICE))
    found = stowed(model, plan, batches, max_norm=0.5, transfer=moves, device=DEVICE)
    assert differences(plain(on(DEVICE, build("llama")), batches, max_norm=0.5), found) == []
    assert device.counts()["registered"] == before["registered"]
    assert "torch cannot register host memory with sim: copies make the host wait" in caplog.text


def test_hooks_that_would_be_lost() -> None:
    """Parameters of a registered kind of device change what they are as they move, and torch keeps hooks with that."""
    model = build("llama")
    model.get_parameter("model.norm.weight").register_hook(lambda grad: grad * 2)
    with pytest.raises(RuntimeError, match="hooks on a tensor are lost on its way to sim:0: register them after stow"):
        stow(model, plan_of(model), device=DEVICE)  # type: ignore[arg-type]
