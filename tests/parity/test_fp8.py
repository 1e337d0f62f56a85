"""Frozen weights in fp8: the bits of plain training of the rounded model, and what the link carries."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.formats import FORMATS
from deepstow.strategies.core.layout import Item, aligned
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.engine.codecs import EncodedWeights, once_encoded
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.planner.step_cost import problem_of
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run import building
from deepstow.trainer.run.exporting.export import export
from deepstow.trainer.verify.verify import _tokenizer
from tests.helpers.doubles import RaceDetector, Vacant
from tests.helpers.engine import differences, plain, stowed
from tests.helpers.models import build, tokens
from tests.helpers.tiny import LLAMA, MIXTRAL
from tests.helpers.worlds import run_counted
from tests.parity.test_disk_weights import base
from tests.parity.test_quantised import LORA, by_itself, config_of, ours, run_of, trained, unlike

BF16, FP32 = torch.bfloat16, torch.float32
STAYS: Any = {"weights": "resident"}
TRAVELS: Any = {"weights": "streamed", "prefetch": 1}


def round_blocks(model: nn.Module) -> Any:
    """The definition, for a model of its own."""
    for name, param in model.named_parameters():
        if ".layers." in name and param.ndim > 1 and not param.requires_grad:
            param.data.copy_(once_encoded(param.data, "fp8"))
    return model


def planned(model: nn.Module, **options: Any) -> Any:
    return plan_for(model, max_grad_norm=0.0, batch=(1, 8), frozen_weights="fp8", debug=True, **options)


@pytest.mark.parametrize(
    ("where", "dtype", "make"),
    [(STAYS, BF16, RaceDetector), (TRAVELS, FP32, RaceDetector), (TRAVELS, BF16, Vacant)],
)
def test_the_bits_are_those_of_the_rounded_model(where: Any, dtype: torch.dtype, make: Callable[[], Transfer]) -> None:
    batches, model = tokens("llama", 3), base(dtype)
    plan = planned(model, **where)
    moved = {name for b in plan.layout.buckets if b.frozen_as and not b.resident for name in b.params}
    assert bool(moved) is (where is TRAVELS)
    expected = plain(round_blocks(base(dtype)), batches)
    assert differences(expected, stowed(model, plan, batches, transfer=make())) == []
    assert differences(plain(base(dtype), batches), expected) != [], "rounding changes nothing"


def test_the_link_and_the_arenas_have_a_byte_per_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the plan says, of the host, the device and each fetch, are those that are there and that go up."""
    model = base(BF16)
    plan = planned(model, weights="streamed", prefetch=0, site="device")
    layout, addresses = plan.layout, plan.place.addresses
    fp8s = [bucket for bucket in layout.buckets if bucket.frozen_as]
    weights = sum(bucket.num_elements for bucket in fp8s)
    assert sum(b.copy_bytes for b in fp8s) == weights + 2 * weights // FORMATS["fp8"].block
    assert addresses.num_bytes(Tier.HOST) == sum(aligned(bucket.copy_bytes, Tier.HOST) for bucket in fp8s)
    assert addresses.of("", Item.CODES).num_bytes == max(bucket.copy_bytes for bucket in fp8s)
    reserved = {share.owner: share.num_bytes for share in plan.reserves(Tier.DEVICE)}
    assert reserved["device: encoded weights"] >= addresses.of("", Item.CODES).num_bytes
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    fetched, bring = list[int](), optimizer.engine.residency._bring_codes

    def watched(bucket: Any, codes: Any) -> None:
        fetched.append(bucket.index)
        bring(bucket, codes)

    monkeypatch.setattr(optimizer.engine.residency, "_bring_codes", watched)
    (batch,) = tokens("llama", 1)
    model(**batch).loss.backward()
    optimizer.step()
    assert len(fetched) > len(fp8s)
    assert optimizer.engine.transfer.bytes_up == sum(layout.buckets[index].copy_bytes for index in fetched)
    optimizer.close()
    weights = {weight.name: weight for weight in problem_of(plan.facts, layout, ASSUMED).weights}
    assert all(weights[b.name].reload_bytes == b.copy_bytes and not weights[b.name].gathered_bytes for b in fp8s)


@pytest.mark.parametrize("where", [STAYS, TRAVELS], ids=["stays", "travels"])
def test_what_others_see_and_write_is_rounded(where: Any) -> None:
    """State dicts, loans, loading and the model after ``close``."""
    model, name = base(BF16), "model.layers.1.mlp.up_proj.weight"
    rounded, plain_state = round_blocks(base(BF16)).state_dict(), base(BF16).state_dict()
    optimizer = stow(model, planned(model, **where), rule=AdamW(lr=1e-2), device="cpu")
    param = model.get_parameter(name)
    assert not torch.equal(rounded[name], plain_state[name])

    def seen() -> torch.Tensor:
        found = model.state_dict()[name].clone()
        with optimizer.present([param]):
            assert torch.equal(param.data, found)
        assert torch.equal(param + 0, found)
        return found

    assert torch.equal(seen(), rounded[name])
    with optimizer.present([param]):
        param.data.mul_(3.01)
    assert torch.equal(seen(), once_encoded(rounded[name] * 3.01, "fp8"))
    model.load_state_dict(plain_state)
    assert torch.equal(seen(), rounded[name])
    optimizer.close()
    assert all(torch.equal(value, rounded[key]) for key, value in model.state_dict().items())


def test_refused() -> None:
    model = base(FP32)
    free = build("llama")
    for made, options, said in (
        (free, {}, "no matrix of a block is frozen"),
        (model, {"zero": {"stage": 3}, "world_size": 2}, "strategies.zero divides them"),
        (model, {"disk": "/var/tmp", "disk_memory": "1GiB"}, "not on a disk"),
    ):
        with pytest.raises(Refusal, match=said) as refused:
            planned(made, **options)
        assert refused.value.key == "strategies.offload.frozen_weights"
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN, infinity or"):
        stow(model, planned(model), rule=AdamW(lr=1e-2), device="cpu")


# --- adapters, by config --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**(MIXTRAL if request.param == "mixtral" else LLAMA))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class Memory(bytearray):
    """Of a weight that was made whole for others; unlike a tensor's it can be watched."""


def made_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights others have, after each that they are given."""
    get, given, counts = EncodedWeights.get, list[weakref.ref[Memory]](), list[int]()

    def watched(self: EncodedWeights, start: int, like: torch.Tensor) -> torch.Tensor:
        found = get(self, start, like)
        memory = Memory(found.view(torch.uint8).numpy().tobytes())
        given.append(weakref.ref(memory))
        counts.append(sum(each() is not None for each in given))
        return torch.frombuffer(memory, dtype=found.dtype).view(found.shape)

    monkeypatch.setattr(EncodedWeights, "get", watched)
    return counts


@pytest.mark.parametrize("saved", ["mixtral"], indirect=True)
def test_saved_and_exported_weight_by_weight(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan has memory for a second base: a checkpoint of adapters makes nothing of it whole, an export one weight
    after the other."""
    lora = {**LORA, "target_modules": ["q_proj"]}
    fp8_weights = {**TRAVELS, "frozen_weights": "fp8"}
    config = config_of(saved, None, lora, strategies={"offload": fp8_weights}, save_strategy="steps", save_steps=2)
    counts, trainer = made_whole(monkeypatch), ours(config)
    trainer.train()
    assert counts == []
    assert export(trainer, _tokenizer(), config) is not None
    assert len(counts) > 10 and set(counts) == {1}


@pytest.mark.parametrize(
    ("saved", "merge"), [("mixtral", False), ("llama", True)], indirect=["saved"], ids=["adapters", "merged"]
)
def test_adapters_resumed_and_exported(merge: bool, saved: Path) -> None:
    """The bits of Transformers and PEFT alone on the rounded base; fused experts travel so, too."""
    lora = {**LORA, "target_modules": ["q_proj", "v_proj"], "export": "merged" if merge else "adapter"}
    alone = by_itself(config_of(saved, None, lora))
    round_blocks(alone.model)
    expected = trained(alone)
    assert unlike(expected, trained(by_itself(config_of(saved, None, lora)))) != []
    fp8_weights = {**TRAVELS, "site": "host", "frozen_weights": "fp8"}
    config = config_of(saved, None, lora, strategies={"offload": fp8_weights}, save_strategy="steps", save_steps=2)
    trainer = ours(config)
    travels = {n for b in trainer.plan.layout.buckets if b.frozen_as and not b.resident for n in b.params}
    assert any("experts" in name or "mlp" in name for name in travels)
    assert unlike(expected, trained(trainer)) == []
    assert export(trainer, _tokenizer(), config) is not None
    assert "frozen weights in fp8" in (saved / "run" / "export" / "README.md").read_text()
    again = trained(ours(config), str(saved / "run" / "checkpoint-2"))
    assert unlike(expected, again) == []
    if merge:
        found = transformers.AutoModelForCausalLM.from_pretrained(saved / "run" / "export").state_dict()
        (name,) = (each for each in found if each.endswith("layers.0.self_attn.o_proj.weight"))
        whole = transformers.AutoModelForCausalLM.from_pretrained(saved).state_dict()[name]
        assert torch.equal(found[name], once_encoded(whole, "fp8")) and not torch.equal(found[name], whole)


def on_ranks(ranks: Ranks, config: RunConfig) -> dict[str, torch.Tensor]:
    return trained(building.make_trainer(run_of(config, ranks)))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("saved", ["llama", "mixtral"], indirect=True)
def test_two_ranks_end_with_the_bits_of_one(saved: Path) -> None:
    """Each has the codes; one rank takes both micro-batches."""
    lora = {**LORA, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    given: Any = {"strategies": {"offload": {**TRAVELS, "frozen_weights": "fp8"}}}
    one = trained(ours(config_of(saved, None, lora, gradient_accumulation_steps=2, **given)))
    assert unlike(one, run_counted(2, on_ranks, config_of(saved, None, lora, **given))) == []
