"""A small copy of a model's config: the same architecture, two narrow layers.

It keeps what changes behaviour (architecture, grouped heads, tied weights, activation function, dropout, layer types)
and shrinks what only costs time. Used where something must be tried on the user's architecture before the real model
exists: equality with plain training, packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTH = 32
# What Hugging Face configs call the same thing, and the size it gets.
HIDDEN, HEADS, FFN, VOCAB = 64, 4, 128, 512
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), FFN),
    "shared_expert_intermediate_size": FFN,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCAB,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2 * LENGTH),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
PER_LAYER = ("layer_types", "mlp_layer_types")


def shrink_model(config: PretrainedConfig) -> dict[str, Any]:
    """``model.config`` of the shrunk copy: the same architecture, two small layers."""
    full = config.get_text_config().to_diff_dict()
    small = {"model_type": config.get_text_config().model_type, **full}
    for name, size in SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and (name in full or name in type(config)().to_dict()):
            small[name] = min(value, size)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int):
        heads = getattr(config, "num_attention_heads", groups)
        small["num_key_value_heads"] = HEADS if groups == heads else max(1, min(groups, HEADS // 2))
    for name in PER_LAYER:
        if small.get(name):
            small[name] = small[name][:2]
    for name in ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"):
        small.pop(name, None)
    return small
