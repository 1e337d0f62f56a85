"""A saved adapter says what it is, and what is not one of the model is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.saved_adapter import other_base
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.build import load_config
from deepstow.trainer.model.contents import stamps, weights
from deepstow.trainer.planning.from_config import plan_of
from tests.helpers.tiny import LLAMA

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
SAID = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "use_rslora": True}


def save(folder: Path, **more: Any) -> Path:
    """A base, and an adapter of it beside it."""
    base = folder / "base"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | more))
    model.save_pretrained(base)
    opened = transformers.AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(opened, LoraConfig(task_type="CAUSAL_LM", **SAID)).save_pretrained(str(folder / "saved"))  # type: ignore[arg-type]
    return folder / "saved"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path)


def config_of(saved: Path, strategies: Any = None, **model: Any) -> RunConfig:
    tree: dict[str, Any] = {"model": {"adapter": str(saved), **model}, "data": {"path": "x", "max_length": 16}}
    tree |= {"training": {"output_dir": "r", "learning_rate": 1e-3, "max_steps": 2, "use_cpu": True}}
    return load_tree({**tree, "strategies": strategies or {}})


def rewrite(saved: Path, **said: Any) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def test_the_folder_says_what_it_is(saved: Path) -> None:
    section = config_of(saved, lora={"lora_dropout": 0.5, "r": 4}).model
    assert section.name_or_path == str(saved.parent / "base") and section.tokenizer is None
    assert section.lora is not None
    assert section.lora.model_dump(exclude_defaults=True) == {
        **SAID, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5
    }  # fmt: skip
    assert config_of(saved).dump() == load_tree(config_of(saved).tree()).dump()
    (saved / "tokenizer_config.json").write_text("{}")
    assert config_of(saved).model.tokenizer == str(saved)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"peft_type": "IA3"}, "it is an adapter of type IA3, and training goes on with LORA alone"),
        ({"base_model_name_or_path": None}, "its adapter_config.json names no base; write model.name_or_path"),
        ({"base_model_name_or_path": "/gone/base"}, "its base /gone/base is not there; write model.name_or_path"),
        ({"task_type": "SEQ_CLS"}, "it is an adapter for SEQ_CLS, and the task needs one for CAUSAL_LM"),
        ({"init_lora_weights": "pissa"}, "it has init_lora_weights = 'pissa', with which training does not go on"),
        ({"r": 8}, "lora_A.weight the adapter has (4, 32), and the model has (8, 32)"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight the adapter has (4, 32), and the model has none"),
    ],
)
def test_what_it_cannot_be(said: dict[str, Any], line: str, saved: Path) -> None:
    rewrite(saved, **said)
    with pytest.raises(ConfigError) as refused:
        plan_of(config_of(saved), Ranks(), probe())
    (found,) = refused.value.lines
    assert "model.adapter = " in found and line in found


def test_files_that_are_missing(saved: Path) -> None:
    (saved / "adapter_model.safetensors").rename(saved / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no adapter_model.safetensors, but a pickled adapter_model.bin; save it"):
        config_of(saved)
    (saved / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"the folder holds no adapter \(no adapter_config.json\); a whole model"):
        config_of(saved)
    with pytest.raises(ConfigError, match=r"there is no such folder; did you mean '.*/saved'"):
        config_of(saved.with_name("save"))


def test_what_the_config_says_otherwise(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(saved, lora={"r": 16, "target_modules": ["q_proj"]})
    first, second = refused.value.lines
    assert f"model.lora.r = 16: the adapter in {saved} has 4; leave it out" in first
    assert 'model.lora.target_modules = ["q_proj"]' in second
    with pytest.raises(ConfigError, match=r"stage 3 of strategies.zero divides weights before an adapter could be"):
        config_of(saved, {"zero": {"stage": 3}})
    other = save(tmp_path / "wide", hidden_size=64).parent / "base"
    with pytest.raises(ConfigError, match=r"the adapter has \(4, 32\), and the model has \(4, 64\); name the base"):
        plan_of(config_of(saved, name_or_path=str(other)), Ranks(), probe())


def test_another_base_of_the_same_form_is_said(saved: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other").parent / "base"
    assert other_base(config_of(saved)) == ""
    assert f"and model.name_or_path is {other}" in other_base(config_of(saved, name_or_path=str(other)))


def test_checkpoints_know_the_adapter(saved: Path) -> None:
    section = config_of(saved).model
    before = weights(section, load_config(section), 0), stamps(section, load_config(section))
    path = saved / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + torch.ones(1).numpy().tobytes())
    after = weights(section, load_config(section), 0), stamps(section, load_config(section))
    assert before[0] != after[0] and before[1] != after[1]
