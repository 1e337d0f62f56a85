"""Adapters on a quantised base train to the bits of PEFT and Hugging Face's Trainer alone, wherever the base rests."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

from deepstow.strategies.core.layout import Site
from deepstow.strategies.planner import least_memory, placement_search, site_search
from deepstow.strategies.planner.places import Placement, Places
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.data.prepare import Contents, Prepared
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.model.adapters import OURS
from deepstow.trainer.run import building
from deepstow.trainer.run.exporting.export import export
from deepstow.trainer.run.session import Session
from deepstow.trainer.run.stowed_trainer import stowed
from deepstow.trainer.verify.verify import _tokenizer, run_on
from tests.helpers.releases import needs_scratch
from tests.helpers.tiny import LLAMA, run_config

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LORA: Mapping[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_alpha": 8, "lora_dropout": 0.1}
BITS: Mapping[str, Mapping[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
ALONE = Ranks(0, 0, 1, 1)
STAYS: Mapping[str, Any] = {"weights": "resident"}
TRAVELS: Mapping[str, Any] = {"site": "host", "weights": "streamed", "prefetch": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


def config_of(base: Path, bits: str | None, lora: Mapping[str, Any] = LORA, **rest: Any) -> RunConfig:
    model = {"config": None, "name_or_path": str(base), "lora": lora}
    model |= {} if bits is None else {"quantization_config": dict(BITS[bits])}
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, **rest}
    return run_config(None, model=model, output_dir=base / "run", **given)


def run_of(config: RunConfig, ranks: Ranks = ALONE) -> Session:
    ids = [[1 + (7 * row + place * place) % 100 for place in range(16)] for row in range(16)]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return run_on(Prepared(rows, None, "input_ids", Contents(fingerprint="rows")), config, ranks)


def adapted(config: RunConfig) -> Any:
    """What Transformers and PEFT make of the config."""
    section, options = config.model, {}
    if section.quantization_config is not None:
        given = transformers.BitsAndBytesConfig(**section.quantization_config.model_dump())
        options = {"quantization_config": given, "device_map": {"": "cpu"}}
    torch.manual_seed(config.training.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(section.name_or_path), **options)
    model.config.use_cache = False
    assert section.lora is not None
    if section.adapter is not None:
        return PeftModel.from_pretrained(model, section.adapter, is_trainable=True)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **section.lora.model_dump(exclude=OURS)))


def by_itself(config: RunConfig, wrap: Callable[[type], type] = lambda base: base, ranks: Ranks = ALONE) -> Any:
    """The Trainer with the model, nothing of ours but its arguments and rows, and how ``wrap`` changes it."""
    plain = run_config(model={"dtype": "float32"})  # which is counted sooner, and arguments do not ask for the model
    run, model = run_of(config.model_copy(update={"strategies": {}, "model": plain.model}), ranks), adapted(config)
    ratio, optimizer = config.model.lora and config.model.lora.loraplus_lr_ratio, None
    if ratio:
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=config.training.learning_rate, loraplus_lr_ratio=ratio, fused=True
        )
    arguments, rows = building.make_arguments(run), run.prepared.train
    return wrap(transformers.Trainer)(
        model, arguments, train_dataset=rows, data_collator=Collator(0, False), optimizers=(optimizer, None)
    )


def ours(config: RunConfig) -> Any:
    return building.make_trainer(run_of(config))


def trained(trainer: Any, *resume: str) -> dict[str, torch.Tensor]:
    """Everything that is trained, after training."""
    trainer.train(*resume)
    state = trainer.model.state_dict()
    return {name: state[name].clone() for name, each in trainer.model.named_parameters() if each.requires_grad}


def unlike(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    assert expected
    return [name for name in expected.keys() | found.keys() if not torch.equal(expected[name], found[name])]


def leaves(trainer: Any) -> set[str]:
    return {bucket.dtype for bucket in trainer.plan.layout.buckets if not bucket.resident}


@pytest.mark.slow
def test_as_peft_alone_and_resumed(base: Path) -> None:
    """By LoRA+, with a head that is trained in full. Kinds of bits differ in bitsandbytes' code alone; 8 of them are in
    ``test_a_trainer_of_others``.
    """
    lora = {**LORA, "loraplus_lr_ratio": 16, "modules_to_save": ["lm_head"], "bias": "all"}
    expected = trained(by_itself(config_of(base, "nf4", lora)))
    for strategies in ({}, {"offload": STAYS}, {"offload": TRAVELS}):
        trainer = ours(config_of(base, "nf4", lora, strategies=strategies, save_strategy="steps", save_steps=2))
        assert unlike(expected, trained(trainer)) == [], strategies
        if strategies:
            assert ("uint8" in leaves(trainer)) is (strategies["offload"] is TRAVELS)
    again = ours(config_of(base, "nf4", lora, strategies={"offload": TRAVELS}))
    assert unlike(expected, trained(again, str(base / "run" / "checkpoint-2"))) == []


def test_going_on_with_a_saved_adapter(base: Path, tmp_path: Path) -> None:
    """Exported after two steps and trained on, as PEFT opens it; and what is saved is trained further."""
    first = config_of(base, None, max_steps=2)
    trainer = ours(first)
    values = trained(trainer)
    assert export(trainer, _tokenizer(), first) is not None
    shutil.copytree(base / "run" / "export", tmp_path / "saved")
    further: dict[str, Any] = {"adapter": str(tmp_path / "saved")}
    config = config_of(base, None)
    config = config.model_copy(update={"model": config.model.model_copy(update=further)})
    expected = trained(by_itself(config))
    for strategies in ({}, {"offload": TRAVELS}):
        on = config_of(base, None, strategies=strategies)
        found = trained(ours(on.model_copy(update={"model": config.model})))
        assert unlike(expected, found) == [], strategies
    assert unlike(values, expected)


@pytest.mark.slow
def test_a_trainer_of_others(base: Path) -> None:
    """A live model is planned on its first batch, and is as it was when it is closed."""
    config = config_of(base, "int8")
    expected = trained(by_itself(config))
    trainer = by_itself(config, lambda kind: stowed(kind, batch=(2, 16), **TRAVELS))
    assert unlike(expected, trained(trainer)) == []
    assert "int8" in leaves(trainer) and sum(unit.saved_bytes for unit in trainer.plan.facts.units)
    probe = {"input_ids": torch.arange(1, 9).unsqueeze(0)}
    before = trainer.model.eval()(**probe).logits
    trainer.stowed.close()
    assert torch.equal(trainer.model(**probe).logits, before)
    kinds = {type(each).__name__ for each in trainer.model.parameters()}
    assert kinds == {"Parameter", "Int8Params"}


@pytest.mark.slow
@needs_scratch
@pytest.mark.parametrize(("bits", "merge"), [("nf4", True), (None, False)])
def test_the_base_on_the_disk(
    bits: str | None, merge: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it that may leave the device; checkpoints, resumed ones and exports as without."""

    def there(places: Places, placement: Placement, room: float) -> Placement:
        frozen = (places.may_leave(index, at) and at.site is Site.NONE for index, at in enumerate(placement))
        return tuple(at._replace(on_disk=is_so) for at, is_so in zip(placement, frozen, strict=True))

    for module in (site_search, placement_search, least_memory):
        monkeypatch.setattr(module, "spilled", there)
    monkeypatch.setattr(site_search, "off_disk", lambda layout, room: layout)
    expected = trained(by_itself(config_of(base, bits)))
    offload = {**TRAVELS, "disk": str(tmp_path), "disk_memory": "64MiB"}
    lora = {**LORA, "export": "merged" if merge else "adapter"}
    config = config_of(base, bits, lora, strategies={"offload": offload}, save_strategy="steps", save_steps=2)
    trainer = ours(config)
    there_is = {bucket.dtype for bucket in trainer.plan.layout.buckets if bucket.weight_on_disk and not bucket.resident}
    assert there_is >= {"float32" if bits is None else "uint8"}
    assert unlike(expected, trained(trainer)) == []
    assert export(trainer, _tokenizer(), config) is not None
    assert unlike(expected, trained(ours(config), str(base / "run" / "checkpoint-2"))) == []


@pytest.mark.slow
def test_accumulated_and_recomputed(base: Path) -> None:
    training = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    expected = trained(by_itself(config_of(base, "nf4", **training)))
    assert unlike(expected, trained(ours(config_of(base, "nf4", strategies={"offload": TRAVELS}, **training)))) == []


def test_exported(base: Path) -> None:
    """Merged is the dequantised weight plus what the adapters add; the export itself compares logits."""
    config = config_of(base, "nf4", {**LORA, "export": "merged"}, strategies={"offload": TRAVELS})
    trainer = ours(config)
    values = trained(trainer)
    assert export(trainer, _tokenizer(), config) is not None
    folder = base / "run" / "export"
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    layer = adapted(config).get_base_model().model.layers[1].mlp.down_proj.base_layer
    whole = dequantize_bnb_weight(layer.weight, SimpleNamespace(SCB=None))
    a, b = (values[f"base_model.model.model.layers.1.mlp.down_proj.lora_{side}.default.weight"] for side in "AB")
    torch.testing.assert_close(again.model.layers[1].mlp.down_proj.weight, whole + 2 * b @ a)


UNDROPPED = {**LORA, "lora_dropout": 0.0}


def each_way(ranks: Ranks, base: Path) -> list[dict[str, torch.Tensor]]:
    """What the Trainer alone trains, what ours does, and ours without dropout."""
    found = [trained(by_itself(config_of(base, "nf4"), ranks=ranks))]
    for lora, strategies in ((LORA, {}), (LORA, {"offload": TRAVELS}), (UNDROPPED, {})):
        found.append(trained(building.make_trainer(run_of(config_of(base, "nf4", lora, strategies=strategies), ranks))))
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks(base: Path) -> None:
    """One process draws other dropout than two ranks, so it has their bits only without."""
    theirs, *ours, without = run_world(2, each_way, base)
    assert [unlike(theirs, each) for each in ours] == [[], []]
    alone = trained(by_itself(config_of(base, "nf4", UNDROPPED, gradient_accumulation_steps=2)))
    assert unlike(alone, without) == [] and unlike(theirs, without) != []
