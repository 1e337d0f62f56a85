"""Moments in fewer bits in the engine: the bits of a plain loop that rounds its moments alike, whatever moves when."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from strategies.core import moments as core
from strategies.core.facts import Home
from strategies.core.layout import Item
from strategies.core.moments import MomentsAs
from strategies.engine import SGD, AdamW, StowOptimizer, stow
from strategies.engine.transfer.transfer import Transfer
from strategies.engine.updating import updates
from strategies.report import full_report
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import differences, plain, plan_of, planned, stowed
from tests.helpers.models import build, tokens
from tests.helpers.moments import rounding_adamw
from tests.helpers.sides import BATCHES, everything, train, unequal
from tests.memory.test_engine import MODELS, model_of
from trainer.planning.plan_for import plan_for

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = get_args(MomentsAs)[1:]
HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "bucket": "half"}
CASES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {  # dtype, the loop, the plan
    "clipped": (FP32, {"max_norm": 0.05}, {"park": "host"}),
    "in backward": (FP32, {}, {"in_backward": True, "weights": "travelling"}),
    "masters": (BF16, {"max_norm": 0.05, "accumulation": 2}, HOST),
    "rounded": (BF16, {"max_norm": 0.05, "accumulation": 2}, HOST | {"rounds": True}),
    "rounded in backward": (BF16, {}, {"in_backward": True, "rounds": True}),
    "masters alone": (BF16, {"max_norm": 0.05}, {"weights": "travelling", "copies": False}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_a_loop_that_rounds_alike(
    case: str, kind: MomentsAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are cut into chunks, and buckets have several: neither is seen."""
    dtype, loop, wished = CASES[case]
    for module in (core, updates):
        monkeypatch.setattr(module, "HOST_CHUNK", 512)
    make: Callable[[], Transfer] = RaceDetector if case == "clipped" else Delayed
    batches, model = tokens("llama", 4 * loop.get("accumulation", 1)), build("llama", dtype=dtype)
    names = [name for name, _ in model.named_parameters()]
    rounding = partial(rounding_adamw, kind, names, rounds=wished.get("rounds", False))
    expected = plain(build("llama", dtype=dtype), batches, make=rounding, **loop)
    if "rounds" in wished:  # masters are the weights
        for name in names:
            assert expected.tensors.pop(f"{name} master").equal(expected.tensors[name].float())
    plan = plan_of(model, moments_as=kind, **{"site": "host", **wished}, **loop)
    assert differences(expected, stowed(model, plan, batches, transfer=make(), **loop)) == []


# --- saving ----------------------------------------------------------------------------------------------------------


def trained(kind: MomentsAs, steps: int, **wished: Any) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama", dtype=BF16)
    plan: Any = plan_of(model, moments_as=kind, **HOST | wished)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    train(model, optimizer, BATCHES[:steps])
    return model, optimizer


@pytest.mark.parametrize(("kind", "rounds"), [*((kind, False) for kind in KINDS), ("int8", True)])
def test_saved_in_fp32_and_resumed_with_the_same_bits(
    kind: MomentsAs, rounds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is that of fp32 moments, which are read under other buckets, and in fp32."""
    for module in (core, updates):
        monkeypatch.setattr(module, "HOST_CHUNK", 512)
    model, optimizer = trained(kind, 2, rounds=rounds)
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
    fresh, other = trained(kind, 1, bucket="one", rounds=rounds)
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


def test_other_rules_are_refused() -> None:
    model = build("llama")
    plan: Any = plan_of(model, moments_as="bf16", site="host", moments=1)
    with pytest.raises(ValueError, match=r"moments in bf16, which are AdamW's two: SGD has \['momentum_buffer'\]"):
        stow(model, plan, rule=SGD(lr=0.1, momentum=0.9), device="cpu")


# --- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_per_parameter() -> None:
    """Of the host's arena, within 1 %, where all weights travel in bf16: less what does not grow with the model."""
    config = MODELS["llama"] | {"vocab_size": 32, "hidden_size": 512, "intermediate_size": 1024}
    model = model_of(config).to(BF16).train()
    facts = plan_for(model, max_grad_norm=1.0, batch=(1, 8)).facts
    kinds: list[tuple[MomentsAs, str, float]] = [
        ("fp32", "fp32", 14), ("bf16", "fp32", 10), ("int8", "fp32", 8.03), ("bf16", "bf16", 8), ("int8", "bf16", 6.03),
    ]  # fmt: skip
    for kind, masters, each in kinds:
        way = {"moments": kind, "masters": masters}
        plan = planned(facts, weights="streamed", site="host", gradients="host", **way)
        assert plan.place is not None and plan.layout is not None
        addresses = plan.place.addresses
        fixed = addresses.spots.get(("", Item.EXPANDED))
        blocks = [bucket for bucket in plan.layout.buckets if not bucket.resident]
        assert sum(sum(bucket.sizes) for bucket in blocks) > 0.9 * sum(p.numel() for p in model.parameters())
        held = addresses.num_bytes(Home.HOST) - (fixed.num_bytes if fixed else 0)
        assert held == pytest.approx(each * sum(p.numel() for p in model.parameters()), rel=0.01), kind
        text = full_report.text(plan, None)
        said = f"not exact: moments in {kind}{', masters in bf16' if masters == 'bf16' else ''}, rounded"
        assert (said in text) is (kind != "fp32")
        assert ("expanded moments" in text) is (kind != "fp32") and ("scales of moments" in text) is (kind == "int8")
