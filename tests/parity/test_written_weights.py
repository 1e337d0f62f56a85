"""Gemma 3n clamps a weight in its forward. That is trained as plainly, or refused while planning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.verify.verify import compare, train
from tests.helpers.tiny import ENDS, HEADS, LLAMA, run_config
from tests.helpers.worlds import run_counted

WEIGHT = "model.layers.0.altup.prediction_coefs.weight"
GEMMA3N: Mapping[str, Any] = {
    "model_type": "gemma3n_text", **HEADS, **ENDS, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "altup_num_inputs": 2, "altup_coef_clip": 0.02, "sliding_window": 8, "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0] * 2, "pad_token_id": 0,
}  # fmt: skip


def config_of(strategies: Mapping[str, Any], model: Mapping[str, Any] = GEMMA3N, folder: object = "unused") -> Any:
    training = {"max_steps": 3, "learning_rate": 1e-1, "max_grad_norm": 0.0}
    return run_config(model, strategies=strategies, output_dir=folder, **training)


def test_what_keeps_copies_of_weights_is_refused() -> None:
    assert WEIGHT in count_model(config_of({})).written and count_model(config_of({}, LLAMA)).written == ()
    for strategies in ({"offload": {}}, {"zero": {"stage": 1}}):
        with pytest.raises(ConfigError, match=f"the model's forward writes to {WEIGHT}, whose copy"):
            plan_of(config_of(strategies), Ranks(), probe())


@pytest.mark.slow
def test_recomputed_it_is_clamped_as_plainly(tmp_path: Path) -> None:
    sides: tuple[dict[str, Any], ...] = ({}, {"recompute": {"policy": "full"}})
    plain, again = (run_counted(1, train, config_of(each, folder=tmp_path))["weights"] for each in sides)
    assert compare(plain, again) == []
    assert 0.02 < plain[WEIGHT].abs().max() < 0.2, "clamped before every update"
