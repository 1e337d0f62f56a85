"""Models that keep to no borders, two engines at once, memory that runs out, on a device that is asynchronous."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.engine import AdamW, UpdateRule, stow
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory.arena import OutOfMemoryError
from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.accelerator import chosen
from tests.helpers.engine import DECAY, LR, STEPS, differences, plain, plan_of, stowed
from tests.helpers.grid import BF16, FORBIDDEN, FP32, batches_on, both, noise, title
from tests.helpers.models import build, on, tokens
from tests.helpers.pairwise import Table
from tests.helpers.releases import needs_scratch
from tests.helpers.sides import both_sides, train, training
from tests.parity.test_zoo import MODELS, NORM, TRAVEL, clipped

DEVICE = f"{chosen.kind}:0"
# The exactness gate of ``tests/parity/test_engine.py``, of which any two levels meet here; all its cases run by
# ``python -m deepstow.benchmarks.gpu_engine --device sim``. The device is compared with itself: its kernels are the
# CPU's, but gradients are summed in another order.
TABLE = Table(
    {
        **{name: levels for name, levels in FP32.factors.items() if name != "transfer"},
        "model": BF16.factors["model"],
        "dtype": (torch.float32, torch.bfloat16),
        "order": ("in turn", "layers"),
    },
    [
        *FORBIDDEN,
        (("dtype", torch.bfloat16), ("recompute", "reentrant")),
        *((("order", "layers"), no) for no in (("tied", True), ("recompute", "reentrant"), ("accumulation", 1))),
    ],
)


@pytest.mark.parametrize("row", [pytest.param(row, id=title(row)) for row in TABLE.rows()])
def test_bits_of_the_table_of_cases(row: Any) -> None:
    case = {name: level for name, level in row.items() if (name, level) != ("order", "in turn")}
    assert differences(*both(case, row["dtype"], DEVICE, AcceleratorTransfer(torch.device(DEVICE)))) == []


@needs_scratch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_weights_on_the_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    """The worker updates beside the device, and drives write behind it; every other block stays on the device."""
    batches, model = batches_on(DEVICE, "llama", STEPS), build("llama", dtype=dtype)
    wished: Any = {"weights_there": True, "passing": True, "in_backward": True, "park": "host", "bucket": "half"}
    plan = plan_of(model, site="host", weights="some", disk=[str(tmp_path)], prefetch=1, **wished)
    found = stowed(model, plan, batches, device=DEVICE, transfer=AcceleratorTransfer(torch.device(DEVICE)))
    assert differences(plain(on(DEVICE, build("llama", dtype=dtype)), batches), found) == []


def test_plain_training_repeats_itself() -> None:
    """Else nothing could be said."""
    row = next(iter(FP32.rows()))
    assert noise(row, torch.float32, DEVICE) == []


# A border that several blocks share, that comes late, that nobody sees into, and that is not there.
ODD = (
    "t5 tied, reentrant",
    "late, none",
    "sealed, later",
    "shared, none",
    "in pairs, later",
    "lora on embeddings, none",
)


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(("model", "where"), zip(ODD, cycle(TRAVEL)))
def test_models_that_keep_to_no_borders(model: str, where: str) -> None:
    both_sides(MODELS[model], clipped, [TRAVEL[where]], max_norm=NORM)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("RMSprop", {"centered": True, "momentum": 0.9}), ("Adagrad", {"lr_decay": 0.1})],
)
def test_rules_without_a_fused_kernel(kind: str, options: dict[str, Any]) -> None:
    """By torch's functions over many tensors, which take memory of their own, and wait for what is skipped."""
    batches, given = batches_on(DEVICE, "llama", STEPS), {"lr": LR, "weight_decay": DECAY, **options}
    make = partial(getattr(torch.optim, kind), **given)
    wanted = plain(on(DEVICE, build("llama")), batches, max_norm=0.5, make=make)
    rule, model = UpdateRule(kind, **given), build("llama")
    plan = plan_of(model, site="mixed", weights="some", park="host", max_norm=0.5, moments=len(rule.names))
    how: dict[str, Any] = {"rule": rule, "device": DEVICE, "transfer": AcceleratorTransfer(torch.device(DEVICE))}
    assert differences(wanted, stowed(model, plan, batches, max_norm=0.5, **how)) == []


def test_two_engines() -> None:
    """In turn, block by block: each has streams and an arena of its own, and the worker's thread knows whose it is."""
    batches = batches_on(DEVICE, "llama", STEPS)
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


@pytest.mark.simulated("the allocator of CUDA keeps memory, in which the arena may fit")
def test_memory_is_given_back(device: Any) -> None:
    """After an attempt for which there is too little, which is one line, as after training."""
    model = build("llama")
    plan: Any = plan_of(model, site="streamed", weights="travelling")
    torch.accelerator.synchronize()
    before = device.counts()["registered"]
    device.limit(torch.accelerator.memory_allocated() + 4096)
    with pytest.raises(OutOfMemoryError, match=r"the device arena .* needs .*: .*out of memory"):
        stow(model, plan, device=DEVICE)
    device.limit(0)
    assert device.counts()["registered"] == before
    optimizer = stow(model, plan, device=DEVICE)
    assert device.counts()["registered"] > before
    model(**batches_on(DEVICE, "llama", 1)[0]).loss.backward()
    optimizer.step()
    optimizer.close()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert list(model.buffers())
    del optimizer, model
    assert device.counts()["registered"] == before


@pytest.mark.usefixtures("there")
def test_a_kind_whose_host_memory_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: Any
) -> None:
    """The same bits; the copies are waited for, and that is said."""
    monkeypatch.setitem(accelerator.TABLE, chosen.kind, accelerator.Row())
    before = device.counts()
    both_sides(partial(build, "llama"), training(), ["host, one ahead"], max_norm=0.5)
    assert device.counts()["registered"] == before["registered"]
    assert f"torch cannot register host memory with {chosen.kind}: copies make the host wait" in caplog.text


def test_stowed_again_with_hooks() -> None:
    """Parameters of a registered kind of device change what they are as they move; hooks go along, those made before
    ``stow``, between and after, and so does training: closed and stowed again, also with other parameters frozen."""
    batches, called = batches_on(DEVICE, "llama", 6), {"plain": 0, "ours": 0}

    def count(name: str, grad: Tensor) -> Tensor:
        called[name] += 1
        return grad * 2

    def sides(name: str) -> tuple[list[float], dict[str, Tensor]]:
        model = build("llama") if name == "ours" else on(DEVICE, build("llama"))
        losses: list[float] = []
        model.get_parameter("model.norm.weight").register_hook(lambda grad: grad).remove()
        model.get_parameter("model.norm.weight").register_hook(partial(count, name))
        for part in range(3):
            model.model.layers[0].requires_grad_(part != 0)  # type: ignore[union-attr, index, operator]
            trained = [param for param in model.parameters() if param.requires_grad]
            if name == "ours":
                site = ("streamed", "host", "device")[part]
                plan: Any = plan_of(model, site=site, weights="travelling")
                optimizer: Any = stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device=DEVICE)
            else:
                optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY, fused=True)
            hook = model.get_parameter("lm_head.weight").register_hook(partial(count, name))
            losses += train(model, optimizer, batches[2 * part : 2 * part + 2])
            if part == 1:
                hook.remove()
            if name == "ours":
                optimizer.close()
        return losses, {key: value.cpu() for key, value in model.state_dict().items()}

    (losses, weights), (ours, our_weights) = sides("plain"), sides("ours")
    assert losses == ours and called["plain"] == called["ours"] > 6
    assert all(torch.equal(value, our_weights[name]) for name, value in weights.items())


@pytest.mark.simulated("parameters of other kinds stay what they are")
def test_a_graph_from_before_raises() -> None:
    model, batch = build("llama"), tokens("llama", 1)[0]
    loss = model(**batch).loss
    optimizer = stow(model, plan_of(model), device=DEVICE)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a graph that was made before its model was stowed or closed"):
        loss.backward()
    loss = model(**batches_on(DEVICE, "llama", 1)[0]).loss
    optimizer.close()
    with pytest.raises(RuntimeError, match="a graph that was made before its model was stowed or closed"):
        loss.backward()


@pytest.mark.simulated("parameters of other kinds stay what they are")
@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.to_empty(device="cpu")], ids=["to", "to_empty"])
def test_moving_a_stowed_model_is_said(move: Callable[[nn.Module], Any]) -> None:
    """On such kinds torch puts new parameters in place of the old ones without asking."""
    model = build("llama")
    stow(model, plan_of(model), device=DEVICE)  # type: ignore[arg-type]
    move(model)
    with pytest.raises(RuntimeError, match="is not the one that was stowed: "):
        model.state_dict()


@pytest.mark.simulated("names its devices")
@pytest.mark.parametrize("device", ["meta", "mps", "sim:1", "cuda"])
def test_devices_that_are_not_here(device: str) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=f"device='{device}': this machine has cpu, sim:0"):
        stow(model, plan_of(model), device=device)  # type: ignore[arg-type]
    assert model(**tokens("llama", 1)[0]).loss.isfinite(), "the model is as it was"
