"""What a run leaves in its export folder: whole, on its own, and as the model came, whatever the strategies."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import build
from tests.e2e.commands import Server, metrics, write_config

pytestmark = pytest.mark.ranks

# A causal language model that Transformers does not know. Its head is tied; the mixing layer is in a second file.
CONFIGURATION = """
from transformers import PretrainedConfig

class SumConfig(PretrainedConfig):
    model_type = "running_sum"

    def __init__(self, vocab_size=512, hidden_size=16, num_hidden_layers=2, use_cache=True, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.use_cache = use_cache
        super().__init__(**{"tie_word_embeddings": True, **kwargs})
"""
MIXING = """
import torch

class Mix(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = torch.nn.Linear(size, size)

    def forward(self, x):
        steps = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + torch.tanh(self.inner(x.cumsum(dim=1) / steps))
"""
MODELING = """
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_sum import SumConfig
from .mixing import Mix

class SumForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SumConfig
    _tied_weights_keys = {"head.weight": "words.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.words = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(Mix(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}
"""
FILES = {"configuration_sum.py": CONFIGURATION, "mixing.py": MIXING, "modeling_sum.py": MODELING}
AUTO_MAP = {"AutoConfig": "configuration_sum.SumConfig", "AutoModelForCausalLM": "modeling_sum.SumForCausalLM"}


def with_its_own_code(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    """A saved model with random weights and its Python files."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text(json.dumps({"model_type": "running_sum", "auto_map": AUTO_MAP}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_with_its_own_code(server: Server, tmp_path: Path) -> None:
    """Its files go with it, so it opens where the base is gone, for those who trust it; and its card is true."""
    base = with_its_own_code(tmp_path / "base")
    config = write_config(
        tmp_path / "trained",
        model={"config": None, "name_or_path": str(base), "trust_remote_code": True},
        data={"eval_fraction": 0.1},
        training={"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
    )
    server.run(2, config, "strategies.zero={stage: 2}").check().quiet()
    shutil.rmtree(base)
    export = tmp_path / "trained" / "run" / "export"

    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(export, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    assert model.head.weight is model.words.weight and model.config.use_cache is True
    stored = load_file(export / "model.safetensors")
    assert len(stored) == len(model.state_dict()) - 1
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())

    card = ModelCard.load(export / "README.md")
    assert "base_model" not in card.data.to_dict() and "custom_code" in card.data.to_dict()["tags"]
    assert "`base`, a model of type running_sum, trained further" in card.text and str(tmp_path) not in str(card)
    last = [record for record in metrics(tmp_path / "trained" / "run") if "eval_loss" in record][-1]
    measured = f"step 2, was {last['eval_loss']:.4f} (perplexity {last['eval_perplexity']:.1f})"
    assert last["step"] == 2 and f"The last evaluation loss, at {measured}." in card.text
    assert "Strategies, on 2 processes: zero (stage 2)" in card.text


@pytest.mark.slow
def test_the_loss_is_said_with_and_without_a_lossy_exchange(server: Server, tmp_path: Path) -> None:
    """The first is the one that was logged, of sums as they are."""
    exchange = {"tokens": 0.5, "bits": 4}
    config = write_config(
        tmp_path,
        data={"eval_fraction": 0.1},
        training={"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        strategies={"tensor": {"degree": 2, "exchange": exchange}},
    )
    found = server.run(2, config).check()
    (line,) = found.lines("held-out loss ")
    exact, other = re.findall(r"(\S+) \(perplexity", line)
    (logged,) = [record["eval_loss"] for record in metrics(tmp_path / "run") if "eval_loss" in record]
    assert exact == f"{logged:.4f}" != other, line


@pytest.mark.parametrize("how", ["in __init__", "saved", "in _init_weights as well"])
def test_a_buffer_that_only_its_code_knows(how: str, tmp_path: Path) -> None:
    """Transformers loads a model without calling what fills a buffer in ``__init__``."""
    register = f'self.register_buffer("scale", torch.full((4,), 2.0), persistent={how == "saved"})'
    mixing = MIXING.replace("    def forward", f"        {register}\n\n    def forward", 1)
    again = """
    def _init_weights(self, module):
        super()._init_weights(module)
        if hasattr(module, "scale"):
            module.scale.fill_(2.0)
"""
    modeling = MODELING + (again if "as well" in how else "")
    base = with_its_own_code(
        tmp_path / how.replace(" ", "_"), {**FILES, "mixing.py": mixing, "modeling_sum.py": modeling}
    )
    section = ModelSection(name_or_path=str(base), trust_remote_code=True)
    if how == "in __init__":
        with pytest.raises(
            ConfigError, match=r"fills 2 buffers that are not saved \(layers\.0\.scale, \.\.\.\) in __init__"
        ):
            build.refuse_lost_buffers(section, build.load_config(section))
        return
    build.refuse_lost_buffers(section, build.load_config(section))
    loaded = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
    assert all((layer.scale == 2).all() for layer in loaded.layers)
