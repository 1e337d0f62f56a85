"""Moments in fewer bits in the engine: the bits of a plain loop that rounds its moments alike, whatever moves when."""

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.core import formats
from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import PAGE_BYTES, Item
from deepstow.strategies.engine import SGD, AdamW, StowOptimizer, stow
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.engine.updating import updates
from deepstow.strategies.planner.addresses import slot_pools
from deepstow.strategies.report import full_report
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import differences, groups_of, plain, plan_of, planned, stowed
from tests.helpers.models import build, tokens
from tests.helpers.moments import rounding_adamw
from tests.helpers.sides import BATCHES, everything, train, unequal
from tests.helpers.zoo import hub
from tests.memory.test_engine import MODELS, model_of

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [name for name, rests in formats.FORMATS.items() if "moments" in rests.uses and name != "fp32"]
HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "bucket": "half"}
ROUNDED: dict[str, Any] = {"rounds": True}
PASSING = ROUNDED | {"passing": True, "in_backward": True, "park": "host"}
CASES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {  # dtype, the loop, the plan
    "clipped": (FP32, {"max_norm": 0.05}, {"park": "host"}),
    "in backward": (FP32, {}, {"in_backward": True, "weights": "travelling"}),
    "masters": (BF16, {"max_norm": 0.05, "accumulation": 2}, HOST),
    "rounded": (BF16, {"max_norm": 0.05, "accumulation": 2}, HOST | {"rounds": True}),
    "passing": (BF16, {}, HOST | PASSING),
    "summed, passing": (BF16, {"accumulation": 2}, HOST | PASSING | {"park": "device"}),
}


@pytest.mark.parametrize(("case", "kind"), zip(CASES, cycle(KINDS)))
def test_the_bits_are_those_of_a_loop_that_rounds_alike(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are cut into chunks, buckets have several: neither is seen. The last update may be short."""
    dtype, loop, wished = CASES[case]
    for module in (formats, updates):
        monkeypatch.setattr(module, "HOST_CHUNK", 512)
    make: Callable[[], Transfer] = RaceDetector if case == "clipped" else Delayed
    batches, model = tokens("llama", 4 * loop.get("accumulation", 1))[:7], build("llama", dtype=dtype)
    names = [name for name, _ in model.named_parameters()]
    rounding = partial(rounding_adamw, kind, names, rounds=wished.get("rounds", False))
    expected = plain(build("llama", dtype=dtype), batches, make=rounding, **loop)
    if "rounds" in wished:  # masters are the weights
        for name in names:
            assert expected.tensors.pop(f"{name} master").equal(expected.tensors[name].float())
    plan = plan_of(model, moments_as=kind, **{"site": "host", **wished}, **loop)
    assert differences(expected, stowed(model, plan, batches, transfer=make(), **loop)) == []


# --- saving ----------------------------------------------------------------------------------------------------------


def trained(kind: str, steps: int, **wished: Any) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama", dtype=BF16)
    plan: Any = plan_of(model, moments_as=kind, **HOST | wished)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    train(model, optimizer, BATCHES[:steps])
    return model, optimizer


@pytest.mark.parametrize(("kind", "wished"), [*((kind, {}) for kind in KINDS), ("int8", PASSING)])
def test_saved_in_fp32_and_resumed_with_the_same_bits(
    kind: str, wished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is that of fp32 moments, which are read under other buckets, and in fp32."""
    for module in (formats, updates):
        monkeypatch.setattr(module, "HOST_CHUNK", 512)
    rounds = "rounds" in wished
    model, optimizer = trained(kind, 2, **wished)
    optimizer.save(tmp_path / "saved")
    before = everything(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()} if rounds else {}
    plainer, as_fp32 = trained("fp32", 1)
    plainer.load_state_dict(weights, strict=False)
    as_fp32.load(tmp_path / "saved")
    after = everything(plainer, as_fp32)
    for name in before.keys() & plainer.state_dict() if rounds else ():  # the masters that it has none of
        assert after.pop(f"{name} master").equal(before[name].float())
    assert unequal(before, after) == []
    train(model, optimizer, BATCHES[2:4])
    fresh, other = trained(kind, 1, bucket="one", **wished)
    fresh.load_state_dict(weights, strict=False)
    other.load(tmp_path / "saved")
    train(fresh, other, BATCHES[2:4])
    assert unequal(everything(model, optimizer), everything(fresh, other)) == []


def test_state_of_others_is_taken_in_and_given_as_copies() -> None:
    """Torch's own state dict goes in, rounded; a dict of all of it, in fp32, is refused, for which there is no room."""
    _, whole = trained("fp32", 2)
    model, optimizer = trained("int8", 1)
    optimizer.load_state_dict(whole.state_dict())
    wanted, first = whole.state_of(next(iter(whole.state))), next(model.parameters())
    found = optimizer.state_of(first)
    assert found["step"] == 2
    for key in ("exp_avg", "exp_avg_sq"):
        assert_near(found[key], wanted[key])
    optimizer.state_of(first)["exp_avg"].zero_()
    assert optimizer.state_of(first)["exp_avg"].count_nonzero() > 0
    with pytest.raises(RuntimeError, match=r"rests in int8, and there is no memory .*state_of"):
        optimizer.state_dict()


@pytest.mark.parametrize("weights", ["resident", "travelling"])
def test_a_master_of_others_becomes_the_weight(weights: str) -> None:
    model, optimizer = trained("int8", 1, rounds=True, weights=weights)
    name, param = next(item for item in model.named_parameters() if "layers.1" in item[0])
    optimizer.state[param] = {"step": 1, "master": torch.full(param.shape, 0.1)}
    assert everything(model, optimizer)[name].eq(torch.tensor(0.1, dtype=BF16)).all()
    before = everything(model, optimizer)[name]
    train(model, optimizer, BATCHES[:1])  # from there, not from what it was
    assert 0 < (everything(model, optimizer)[name] - before).abs().max() < 0.02


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert 0 < (found - wanted).norm() < 0.05 * wanted.norm()


def test_a_gradient_that_waits_for_others_of_its_bucket_is_not_overwritten() -> None:
    """One parameter of a block is not used: its bucket waits until backward has ended, and others need the place."""
    model, optimizer = trained("int8", 1, **PASSING | {"bucket": "one"})
    mlp: Any = model.get_submodule("model.layers.3.mlp")
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x))
    with pytest.raises(RuntimeError, match=r"needs the place of the gradients of .*: set strategies.offload.gradients"):
        train(model, optimizer, BATCHES[1:2])


def test_other_rules_are_refused() -> None:
    model = build("llama")
    plan: Any = plan_of(model, moments_as="bf16", site="host", moments=1)
    with pytest.raises(ValueError, match=r"moments in bf16, which are AdamW's two: SGD has \['momentum_buffer'\]"):
        stow(model, plan, rule=SGD(lr=0.1, momentum=0.9), device="cpu")


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bytes_per_parameter() -> None:
    """Of the host's arena, within 1 %, where all weights travel in bf16: less what does not grow with the model."""
    config = MODELS["llama"] | {"vocab_size": 32, "hidden_size": 512, "intermediate_size": 1024}
    model = model_of(config).to(BF16).train()
    kinds: list[tuple[str, str, str, float]] = [
        ("fp32", "fp32", "host", 14), ("bf16", "fp32", "host", 10), ("int8", "fp32", "host", 8.03),
        ("bf16", "bf16", "host", 8), ("int8", "bf16", "host", 6.03), ("int8", "bf16", "passing", 4.03),
    ]  # fmt: skip
    for kind, masters, gradients, each in kinds:
        facts = plan_for(model, max_grad_norm=float(gradients == "host"), eval_rows=0, batch=(1, 8)).facts
        way = {"moments": kind, "masters": masters, "gradients": gradients}
        plan = planned(facts, weights="streamed", site="host", **way)
        assert plan.place is not None and plan.layout is not None
        addresses = plan.place.addresses
        expanded, slots = addresses.spots.get(("", Item.EXPANDED)), slot_pools(plan.layout)
        fixed = expanded.num_bytes if expanded else 0
        fixed += sum(pool.num_bytes for pool in slots if pool.tier is Tier.HOST)
        blocks = [bucket for bucket in plan.layout.buckets if not bucket.resident]
        assert sum(sum(bucket.sizes) for bucket in blocks) > 0.9 * sum(p.numel() for p in model.parameters())
        held = addresses.num_bytes(Tier.HOST) - fixed
        assert held == pytest.approx(each * sum(p.numel() for p in model.parameters()), rel=0.01), kind
        text = full_report.text(plan, None)
        said = f"not exact: moments in {kind}{', masters in bf16' if masters == 'bf16' else ''}, rounded"
        assert (said in text) is (kind != "fp32")
        assert resident_after(plan, model) == pytest.approx(addresses.num_bytes(Tier.HOST), rel=0.01), way
        assert ("expanded moments" in text) is (kind != "fp32") and ("scales of moments" in text) is (kind == "int8")


@pytest.mark.slow
def test_vectors_of_two_blocks_keep_no_slot_from_the_matrices_of_these_blocks() -> None:
    """Those without weight decay are a bucket: half of its gradients have come when the others of a block do."""
    model, ids = hub("t5"), torch.arange(16).view(2, 8)
    batches = [{"input_ids": ids + step, "labels": ids + step} for step in range(3)]
    way: dict[str, Any] = {"bucket_size": "4KiB", "site": "host", "weights": "streamed", "gradients": "passing"}
    plan = plan_for(model, groups_of(model, 2), max_grad_norm=0.0, batch=(2, 8), **way)
    assert differences(plain(hub("t5"), batches, groups=2), stowed(model, plan, batches, groups=2)) == []


def resident_after(plan: Any, model: nn.Module) -> int:
    """Bytes of the host's arena that are in memory after two steps, by the system."""
    optimizer = stow(model, plan, rule=AdamW(), device="cpu")
    ids = torch.arange(64).view(8, 8) % 32
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    memory = optimizer.engine.arena._host.memory
    pages = (ctypes.c_ubyte * -(-memory.numel() // PAGE_BYTES))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), pages) == 0
    optimizer.close()
    return PAGE_BYTES * sum(page & 1 for page in pages)
