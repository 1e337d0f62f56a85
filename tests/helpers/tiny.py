"""Tiny configs: models of a few thousand parameters, and runs on random tokens."""

from collections.abc import Mapping
from typing import Any

from deepstow.strategies.core.registry import find
from deepstow.trainer.config.sections import RunConfig

VOCAB = 128
ENDS: Mapping[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
HEADS: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, **HEADS, **ENDS,
}  # fmt: skip
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, **ENDS,
}  # fmt: skip
BLOOM: Mapping[str, Any] = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, **ENDS}
OPT: Mapping[str, Any] = {
    "model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0,
    "pad_token_id": 1, **HEADS, **ENDS,
}  # fmt: skip
QWEN3: Mapping[str, Any] = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
MIXTRAL: Mapping[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA, "gpt2": GPT2, "bloom": BLOOM, "opt": OPT, "qwen3": QWEN3, "mixtral": MIXTRAL,
}  # fmt: skip


def run_config(
    config: Mapping[str, Any] | None = LLAMA,
    *,
    output_dir: object = "unused",
    stage: int | None = None,
    strategies: Mapping[str, Mapping[str, Any]] | None = None,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """A run of ``config`` with random weights (None: ``model`` names a folder).

    Args:
        stage: switches ZeRO on; ``strategies`` does so with any, by name and options.
        training: options of that section.
    """
    given = strategies or ({} if stage is None else {"zero": {"stage": stage}})
    return RunConfig.model_validate(
        {
            "model": {"config": None if config is None else dict(config), "tokenizer": "none", **(model or {})},
            "data": {"path": "random tokens", "max_length": 16, **(data or {})},
            "training": {"output_dir": str(output_dir), "save_strategy": "no", "report_to": ["none"], **training},
            "strategies": {name: find(name).model_validate(options) for name, options in given.items()},
        }
    )
