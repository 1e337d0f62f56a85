"""Parameters as the planner lists them."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.model.build import load_config
from deepstow.trainer.model.params import decay_groups, list_params
from deepstow.trainer.planning.plan_for import count_live
from tests.helpers.models import build
from tests.helpers.tiny import MODELS
from tests.helpers.zoo import hub


def test_what_an_embedding_only_looks_up() -> None:
    """Not what shares its unit and is multiplied by, as a norm."""
    listed = list_params(build("bert"), {}, lambda _: "float32")
    looked_up = {param.name.removeprefix("bert.embeddings.") for param in listed if param.looked_up}
    assert looked_up == {f"{name}_embeddings.weight" for name in ("word", "position", "token_type")}
    tied = list_params(build("llama", tied=True), {}, lambda _: "float32")
    assert [(param.users, param.looked_up) for param in tied if "embed" in param.name] == [(("head",), True)]


def test_a_tied_head_reads_the_embedding_in_a_module_of_its_own() -> None:
    """Seen in a forward on fake tensors, which replace a parameter under all its names."""
    counted = count_live(build("llama", tied=True), (2, 8), [])
    assert [param.name for param in counted.params if param.elsewhere] == []


def test_what_is_in_use_while_blocks_run() -> None:
    """Parameters of the model itself, and of a module that contains blocks."""
    for model, wanted in ((build("shared"), "scale"), (hub("wav2vec2"), "inner.wav2vec2.masked_spec_embed")):
        assert [param.name for param in list_params(model, {}, lambda _: "float32") if param.elsewhere] == [wanted]


@pytest.mark.parametrize("name", MODELS)
def test_weight_decay_is_for_those_that_the_trainer_says(name: str) -> None:
    with torch.device("meta"):
        section = ModelSection(config=dict(MODELS[name]), tokenizer="none")
        model = AutoModelForCausalLM.from_config(load_config(section))
    rule: Any = Trainer.get_decay_parameter_names  # uses nothing of its trainer
    decayed = set(rule(None, model))
    assert decayed
    assert decay_groups(model) == {name: int(name not in decayed) for name, _ in model.named_parameters()}
