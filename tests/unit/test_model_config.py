"""``model.config`` against the architecture's config class, and the small copy of models with few heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deepstow.trainer.config.load import load
from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import config_keys
from deepstow.trainer.model.build import load_config
from deepstow.trainer.model.shrink import shrink_model
from deepstow.trainer.planning.facts import count_model
from tests.helpers.tiny import MIXTRAL, run_config

LLAMA = "model_type: llama, hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2"


def lines(tmp_path: Path, config: str) -> list[str]:
    """What is wrong with this ``model.config``, without the name of the file."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model:\n  tokenizer: none\n  config: {{{config}}}\ndata: {{path: pydoc}}\n"
        f"training: {{output_dir: {tmp_path}/run, learning_rate: 1e-3}}\n"
    )
    wrong = load(path)
    with pytest.raises(ConfigError) as refused, wrong.placing():
        config_keys.check(wrong, load_config(wrong.model))
    with pytest.raises(ConfigError, match=r"model\.config"):  # the planner's way to a model
        count_model(wrong)
    assert all(line.startswith(f"{path}:3: model.config.") for line in refused.value.lines)
    return [line.removeprefix(f"{path}:3: model.config.") for line in refused.value.lines]


WIDE = "must be a whole number >= 1 and <= 268435456"
DEEP = "must be a whole number >= 1 and <= 2000"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            f"{LLAMA}, num_layrs: 3, intermediate_sise: 9, vocab_size: 0",
            [
                "num_layrs = 3: unknown key of llama; did you mean 'num_hidden_layers'?",
                "intermediate_sise = 9: unknown key of llama; did you mean 'intermediate_size'?",
                f"vocab_size = 0: {WIDE}",
            ],
        ),
        ("model_type: gpt2, n_embed: 64", ["n_embed = 64: unknown key of gpt2; did you mean 'n_embd'?"]),
        ("model_type: gpt2, n_layer: -2", [f"n_layer = -2: {DEEP}"]),
        (
            "model_type: llama, hidden_size: 1000000000000, num_hidden_layers: 1000000000000",
            [f"hidden_size = 1000000000000: {WIDE}", f"num_hidden_layers = 1000000000000: {DEEP}"],
        ),
        (f"{LLAMA}, rope_theta: -1.0", ["rope_theta = -1.0: must be > 0"]),
        ("model_type: gpt2, n_head: 5, n_embd: 64", ["n_head = 5: must divide the model's width, which is 64"]),
        (f"{LLAMA}, num_key_value_heads: 3", ["num_key_value_heads = 3: must divide the number of heads, which is 4"]),
    ],
    ids=range(7),
)
def test_keys_and_sizes(tmp_path: Path, config: str, expected: list[str]) -> None:
    assert sorted(lines(tmp_path, config)) == sorted(expected)


def test_a_key_that_the_model_reads_and_its_config_class_has_not() -> None:
    """It is taken, and decides the shape; a misspelt one and one of another part of a config are not."""
    wide = {**MIXTRAL, "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 16}
    heads, width = wide["num_attention_heads"], wide["hidden_size"]
    config = run_config(wide, strategies={"offload": {}})
    sizes = {param.name: param.num_elements for param in count_model(config).params}
    assert sizes["model.layers.0.self_attn.q_proj.weight"] == heads * 16 * width != width * width
    with pytest.raises(ConfigError, match=r"head_dims = 16: unknown key of qwen3_moe; did you mean 'head_dim'\?"):
        count_model(run_config({**wide, "head_dims": 16}))
    with pytest.raises(ConfigError, match="hidden_size = 32: unknown key of gemma3"):
        count_model(run_config({"model_type": "gemma3", "hidden_size": 32}))


def test_a_forward_that_asks_for_values_is_refused_by_that() -> None:
    """JetMoe sends tokens to experts by numbers that it takes from the device."""
    options = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    with pytest.raises(
        ConfigError, match=r"^model: jetmoe: its forward asks for values of tensors .* in a loop of your"
    ):
        count_model(run_config({"model_type": "jetmoe", **options, **sizes}))


def test_sizes_whose_product_is_absurd() -> None:
    sizes = dict.fromkeys(("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"), 2**28)
    config = run_config({"model_type": "llama", "num_hidden_layers": 1, **sizes})
    with pytest.raises(ConfigError, match=r"^model\.config: cannot be built: RuntimeError: .*overflow"):
        count_model(config)


def test_other_names_and_old_names_are_known() -> None:
    """Names that a class maps to its own, and keys that it takes over into others."""
    for kind, given in {
        "gpt2": {"hidden_size": 64, "num_hidden_layers": 2},
        "llama": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
        "mixtral": {"num_experts": 4, "sliding_window": None},
        "gemma": {"hidden_size": 60, "num_attention_heads": 7, "num_key_value_heads": 1},  # heads have their own width
    }.items():
        section = ModelSection(config={"model_type": kind, **given}, tokenizer="none")
        built = load_config(section)
        assert not [*config_keys._unknown(given, built), *config_keys._impossible(given, built)]


@pytest.mark.parametrize(("kind", "heads"), [("llama", 6), ("gpt2", 3)])
def test_the_copy_of_a_model_with_few_heads_runs(kind: str, heads: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32 * heads, "num_attention_heads": heads, "num_hidden_layers": 3}
    for groups in [number for number in range(1, heads + 1) if heads % number == 0] if kind == "llama" else [heads]:
        more = {"num_key_value_heads": groups} if kind == "llama" else {}
        small = shrink_model(AutoConfig.for_model(kind, **sizes, **more))
        config = AutoConfig.for_model(small.pop("model_type"), **small)
        loss = AutoModelForCausalLM.from_config(config)(
            **dict.fromkeys(("input_ids", "labels"), torch.ones(1, 8).long())
        ).loss
        assert loss.isfinite() and config.num_hidden_layers == 2


def test_rows_longer_than_the_models_positions_are_one_line() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = run_config({"model_type": "bert", "is_decoder": True, "max_position_embeddings": 2, **sizes})
    with pytest.raises(ConfigError, match=r"data\.max_length = 16: the model has 2 positions; write 2 or less$"):
        count_model(config)
