"""Adapters on a quantised base train to the bits of PEFT and Hugging Face's Trainer alone, wherever the base rests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

from strategies.core.plan import Kind
from tests.helpers.tiny import LLAMA, run_config
from trainer.config.sections import RunConfig
from trainer.data.collate import Collator
from trainer.data.prepare import Prepared
from trainer.dist.ranks import Ranks
from trainer.run import order
from trainer.verify.verify import run_on

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LORA: Mapping[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_alpha": 8, "lora_dropout": 0.1}
BITS: Mapping[str, Mapping[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}
STAYS, TRAVELS = {"weights": "resident"}, {"site": "host", "weights": "streamed", "prefetch": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {**LLAMA, "num_hidden_layers": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def config_of(base: Path, bits: str, strategies: Mapping[str, Any], **training: Any) -> RunConfig:
    model = {"config": None, "name_or_path": str(base), "lora": LORA, "quantization_config": dict(BITS[bits])}
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, **training}
    return run_config(None, model=model, strategies=strategies, output_dir=base / "run", **given)


def run_of(config: RunConfig) -> order.Run:
    ids = [[1 + (7 * row + place * place) % 100 for place in range(16)] for row in range(16)]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return run_on(Prepared(rows, None, "rows", "input_ids"), config, Ranks(0, 0, 1, 1))


def by_itself(base: Path, config: RunConfig) -> dict[str, torch.Tensor]:
    """What Transformers, PEFT and the Trainer make of it without anything of ours but the arguments and the rows."""
    from peft import LoraConfig, get_peft_model

    run = run_of(config)
    torch.manual_seed(config.training.seed)
    options = transformers.BitsAndBytesConfig(**config.model.quantization_config.model_dump())  # type: ignore[union-attr]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=options, device_map={"": "cpu"})
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    trainer = transformers.Trainer(
        model, order.make_arguments(run), train_dataset=run.prepared.train, data_collator=Collator(0, False)
    )
    trainer.train()
    return trained(model)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}


@pytest.mark.parametrize("bits", BITS)
def test_as_peft_alone(bits: str, base: Path) -> None:
    config = config_of(base, bits, {})
    expected = by_itself(base, config)
    for strategies in ({}, {"offload": STAYS}, {"offload": TRAVELS}):
        run = run_of(config_of(base, bits, strategies))
        trainer = order.make_trainer(run)
        trainer.train()
        found = trained(trainer.model)
        wrong = [name for name in expected.keys() | found.keys() if not torch.equal(expected[name], found[name])]
        assert expected and wrong[:3] == [], strategies
        if "offload" in strategies:
            layout = run.plan.layout
            assert layout is not None
            left = {bucket.dtype for bucket in layout.buckets if not bucket.resident}
            assert (strategies["offload"] is TRAVELS) == bool(left & {"uint8", "int8"})
    assert Kind
