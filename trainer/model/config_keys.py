"""The keys of ``model.config``, checked against the architecture's own config class before any data is read.

Transformers keeps a key that a config class does not have as an attribute, which hardly any model reads, and takes any
whole number as a size. A misspelt key would train another model than was meant, and a negative size ends in a
traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.planner.cuts import DEPTHS
from trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.config.sections import RunConfig

HEADS, GROUPS = ("num_attention_heads", "n_head"), "num_key_value_heads"
WIDTHS = ("hidden_size", "n_embd", "d_model")
POSITIVE = {
    *DEPTHS, *HEADS, GROUPS, *WIDTHS, "word_embed_proj_dim", "intermediate_size", "ffn_dim", "n_inner", "head_dim",
    "vocab_size", "max_position_embeddings", "n_positions",
}  # fmt: skip
LARGEST, MOST_LAYERS = 2**28, 10_000  # the square of a size, in bytes, has to fit into 64 bits; layers are objects
ABOVE_0 = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"}


def check(config: RunConfig, built: PretrainedConfig) -> None:
    """Raise ConfigError with a line for each key of ``model.config`` that ``built``, made from it, cannot mean."""
    given = config.model.config or {}
    found = [*_unknown(given, built), *_impossible(given, built)]
    made = getattr(built, "quantization_config", None)
    if made is not None:
        method = made.get("quant_method") if isinstance(made, dict) else getattr(made, "quant_method", made)
        what = f"its weights are quantised already ({method}); name the model that they were made from, and write "
        raise config.error("model.name_or_path", config.model.name_or_path, f"{what}model.quantization_config")
    if found:
        errors = [config.error(f"model.config.{key}", given[key], what) for key, what in found]
        raise ConfigError(line for error in errors for line in error.lines)


def keys_of(built: PretrainedConfig) -> set[str]:
    """The keys that the class of ``built`` has, other names of the same values included."""
    kind = type(built)
    return {*vars(kind()), *kind.attribute_map, *getattr(kind, "__dataclass_fields__", ())}


def _unknown(given: Mapping[str, Any], built: PretrainedConfig) -> Iterator[tuple[str, str]]:
    known = keys_of(built)
    # Others were consumed by the class.
    found = [key for key, value in given.items() if key not in known and key in vars(built) and value is not None]
    if found:
        known |= read_by_model(built)
    for key in found:
        if key not in known:
            yield key, f"unknown key of {built.model_type}{nearest(key, known)}"


def read_by_model(built: PretrainedConfig) -> set[str]:
    """Keys that the code of the model reads, of which its config class declares some only (``head_dim`` of Qwen 3 MoE).
    The code is read, not loaded. Of a config with parts none: which part a key is read from is not known.
    """
    if built.sub_configs:
        return set()
    with suppress(ImportError):
        spec = find_spec(type(built).__module__.replace(".configuration_", ".modeling_"))
        if spec is not None and spec.origin is not None:
            code = Path(spec.origin).read_text()
            return {
                *re.findall(r"\bconfig\.(\w+)", code),
                *re.findall(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"', code),
            }
    return set()


def _impossible(given: Mapping[str, Any], built: PretrainedConfig) -> Iterator[tuple[str, str]]:
    for key, value in given.items():
        most = MOST_LAYERS if key in DEPTHS else LARGEST
        if key in POSITIVE and isinstance(value, int) and not 1 <= value <= most:
            yield key, f"must be a whole number >= 1 and <= {most}"
        if key in ABOVE_0 and isinstance(value, int | float) and not value > 0:
            yield key, "must be > 0"
    sizes = {name: value for name in POSITIVE if isinstance(value := getattr(built, name, None), int) and value > 0}
    heads = next((sizes[name] for name in HEADS if name in sizes), 1)
    width = next((sizes[name] for name in WIDTHS if name in sizes), heads)
    derived = "head_dim" not in given and sizes.get("head_dim", width // heads) == width // heads
    for key in given:
        if key in HEADS and derived and width % heads:
            yield key, f"must divide the model's width, which is {width}"
        if key == GROUPS and key in sizes and heads % sizes[key]:
            yield key, f"must divide the number of heads, which is {heads}"
