"""Weights of trained blocks that rest on the disk: each is written by its update, and not read before it has been."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Layout
from deepstow.strategies.core.on_disk import disk_bytes, rewritten_bytes, weights_on_disk
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.engine import AdamW, StowOptimizer, slots, stow
from deepstow.strategies.engine.memory.disk_weights import WRITES
from deepstow.strategies.engine.memory.scratch_file import DiskError
from deepstow.strategies.planner import places
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.engine import differences, plain, plan_of, planned, stowed
from tests.helpers.late import Early, Late
from tests.helpers.models import build, tokens
from tests.helpers.releases import needs_scratch
from tests.helpers.sides import BATCHES, everything, train, unequal
from tests.memory.test_engine import MODELS, model_of

pytestmark = needs_scratch
BF16, FP32 = torch.bfloat16, torch.float32
HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "bucket": "half"}


@pytest.mark.parametrize(("dtype", "loop"), [(BF16, {}), (FP32, {"accumulation": 2})], ids=["passing", "accumulated"])
def test_no_read_begins_before_the_write_has_ended(
    dtype: torch.dtype, loop: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drives write when somebody waits for it and no sooner; slots read as soon as they are told what comes."""
    monkeypatch.setattr(slots, "thread", lambda name="": Late() if name == WRITES else Early())
    model, batches = build("llama", dtype=dtype), tokens("llama", 4 * loop.get("accumulation", 1))
    wished: Any = HOST | {"weights_there": True, "in_backward": True, "passing": not loop, "park": "host"}
    plan: Any = plan_of(model, disk=[str(tmp_path)], prefetch=1, **wished, **loop)
    assert len(weights_on_disk(plan.layout)) > plan.layout.window_slots + 1, "some slot has two weights"
    expected = plain(build("llama", dtype=dtype), batches, **loop)
    assert differences(expected, stowed(model, plan, batches, **loop)) == []


def test_the_planner_puts_there_what_the_host_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is trained whose weights are larger than device and host together; no more is there than has to be."""
    monkeypatch.setattr(places, "Layout", partial(Layout, window_elements=16384))
    sizes = {"num_hidden_layers": 8, "vocab_size": 32, "hidden_size": 192, "intermediate_size": 384}

    def made() -> Any:
        return model_of(MODELS["llama"] | sizes).to(BF16).train()

    model = made()
    facts = plan_for(model, max_grad_norm=0.0, eval_rows=0, batch=(1, 8)).facts
    weights = 2 * sum(param.numel() for param in model.parameters())
    given: Any = {
        "gpu_memory": 9 * weights // 20, "bucket_size": "128KiB", "disk": str(tmp_path), "disk_memory": "64MiB",
        "host_memory": weights // 2, "site": "host", "weights": "streamed",
    }  # fmt: skip
    with pytest.raises(MemoryRefusal, match=r"gradients: passing and training\.max_grad_norm: 0\)"):
        planned(facts, **given)
    given |= {"gradients": "passing"}
    plan, roomy = planned(facts, **given), planned(facts, **given | {"host_memory": 2 * weights})
    assert isinstance(plan.layout, Layout) and isinstance(roomy.layout, Layout) and plan.place is not None
    assert weights_on_disk(roomy.layout) == {} and disk_bytes(roomy.layout) > 0
    there = sum(map(rewritten_bytes, plan.layout.buckets))
    hosted = plan.place.addresses.num_bytes(Tier.HOST)
    assert hosted <= weights // 2 and weights // 3 < there <= disk_bytes(plan.layout)
    largest = max(bucket.weight_bytes for bucket in plan.layout.buckets if bucket.weight_on_disk)
    assert weights // 2 - hosted < 2 * largest
    with pytest.raises(MemoryRefusal) as refused:
        planned(facts, **given | {"host_memory": 10_000})
    enough = planned(facts, **given | {"host_memory": refused.value.needed})
    ids = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    expected = plain(made(), batches)
    for each in (plan, enough):
        assert differences(expected, stowed(made(), each, batches)) == []


# --- from outside ----------------------------------------------------------------------------------------------------


def trained(folder: Path | str, steps: int, dtype: torch.dtype = BF16) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama", dtype=dtype)
    there: Any = {"disk": [str(folder)], "weights_there": True, "passing": True} if folder else {}
    plan: Any = plan_of(model, in_backward=True, park="host", **there, **HOST)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    train(model, optimizer, BATCHES[:steps])
    return model, optimizer


def test_weights_from_outside(tmp_path: Path) -> None:
    """What is shown, and what is written, and what stays when the optimizer is closed, is as without the disk."""
    found = list[dict[str, torch.Tensor]]()
    for folder in ("", str(tmp_path)):
        model, optimizer = trained(folder, 1)
        seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: tensor * 2 for name, tensor in seen.items()})
        with optimizer.present(model.parameters()), torch.no_grad():
            for param in model.parameters():
                param.add_(0.5)
        train(model, optimizer, BATCHES[1:2])
        seen |= {f"{name} trained": tensor for name, tensor in everything(model, optimizer).items()}
        optimizer.close()
        found.append(seen | {f"{name} after": tensor for name, tensor in model.state_dict().items()})
    assert unequal(*found) == []


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_saved_from_the_disk_and_loaded_into_it(dtype: torch.dtype, tmp_path: Path) -> None:
    there, before, after = tmp_path / "there", tmp_path / "before", tmp_path / "after"
    there.mkdir()
    first, in_memory = trained("", 2, dtype)
    in_memory.save(before)
    weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    model, optimizer = trained(there, 2, dtype)
    optimizer.save(after)
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in (before, after)]
    assert sizes[1] < 1.1 * sizes[0], "in fp32 there are no masters beside the weights"
    train(model, optimizer, BATCHES[2:3])
    for folder, saved in ((there, before), ("", after)):
        again, loaded = trained(folder, 1, dtype)
        again.load_state_dict(weights)
        loaded.load(saved)
        train(again, loaded, BATCHES[2:3])
        assert unequal(everything(model, optimizer), everything(again, loaded)) == []
        loaded.close()
    assert list(there.iterdir()) == []


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the update: whoever wants the weight next says so, and nothing is saved."""
    model, optimizer = trained(tmp_path, 1)
    disk = optimizer.engine.disk_weights
    assert disk is not None
    weights, done = disk._file.on(0)._handle, os.pwritev

    def fails(handle: int, *given: Any) -> int:
        if handle == weights:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return done(handle, *given)

    monkeypatch.setattr(os, "pwritev", fails)
    said = f"the disk tier in {tmp_path}: .* of weights could not be written: Input/output error"
    with pytest.raises(DiskError, match=said):
        train(model, optimizer, BATCHES[1:3])
    with pytest.raises(RuntimeError):
        optimizer.save(tmp_path / "saved")
