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

from deepstow.strategies.planner.cuts import DEPTHS
from deepstow.trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from deepstow.trainer.config.sections import RunConfig

HEADS, GROUPS = ("num_attention_heads", "n_head"), "num_key_value_heads"
WIDTHS = ("hidden_size", "n_embd", "d_model")
POSITIVE = {
    *DEPTHS, *HEADS, GROUPS, *WIDTHS, "word_embed_proj_dim", "intermediate_size", "ffn_dim", "n_inner", "head_dim",
    "vocab_size", "max_position_embeddings", "n_positions",
}  # fmt: skip
LARGEST = 2**28  # the square of a size, in bytes, has to fit into 64 bits
# Of what is an object or a text each; the largest known models have 200 layers, and 30,000 experts in all layers.
MOST_LAYERS = 2_000
MOST_EXPERTS = 100_000
MOST_LABELS = 2**20
_LABELS = re.compile("(num|n)_labels")
_EXPERTS = re.compile(r"(num|n|moe)_(\w+_)?experts|experts")
_MODULES = re.compile(
    r"(num|n)_(\w+_)?(layer|block|stage|group|adapter|codebook|branch|level|module|scale|stack)s?"
    r"|(\w+_)?(layers|depths?|stages|codebooks)"
)
_SIZE = re.compile(r"(num|n)_\w+|max_position\w*|(\w+_)?(size|dim|dims|width|channels|heads|positions|rank|inner)")
CODE = ("attn_implementation", "experts_implementation")  # a name with a slash is that of code on the hub
ABOVE_0 = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"}


def check(config: RunConfig, built: PretrainedConfig) -> None:
    """Raise ConfigError with a line for each key of ``model.config`` that ``built``, made from it, cannot mean."""
    written = config.model.config or {}
    problems = [*_unknown(written, built), *_impossible(written, built)]
    quant = getattr(built, "quantization_config", None)
    if quant is not None:
        method = quant.get("quant_method") if isinstance(quant, dict) else getattr(quant, "quant_method", quant)
        what = f"its weights are quantised already ({method}); name the model that they were made from, and write "
        raise config.error("model.name_or_path", config.model.name_or_path, f"{what}model.quantization_config")
    if problems:
        errors = [config.error(f"model.config.{key}", written[key], what) for key, what in problems]
        raise ConfigError(line for error in errors for line in error.lines)


def impossible(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, str]]:
    """Keys of a configuration as it is written, nested ones too, that no model can have, with value and reason.

    Looked at before a class is made of it, since many make a list of all layers, or a text for each label.
    """
    for key, value in _leaves(tree, at):
        name = key.rpartition(".")[2]
        if name.strip("_").removesuffix("_internal") in CODE and "/" in str(value):
            yield key, value, "would load code from the Hugging Face hub, and a run loads none; take the key out"
        if isinstance(value, int | float) and (most := most_of(name)) and value > most:
            yield key, value, f"must be a whole number >= 1 and <= {most}"
    counts = {key: value for key, value in tree.items() if isinstance(value, int)}
    layers = max((value for key, value in counts.items() if key in DEPTHS), default=1)
    experts = next(((key, value) for key, value in counts.items() if _EXPERTS.fullmatch(key)), ("", 0))
    if layers <= MOST_LAYERS and MOST_EXPERTS // max(1, layers) < experts[1] <= MOST_EXPERTS:
        what = f"{layers} layers would have over {MOST_EXPERTS} experts, more than any machine holds"
        yield f"{at}{experts[0]}", experts[1], what
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from (inner for inner in impossible(value, f"{at}{key}."))


def _leaves(tree: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """Values of a configuration, those in lists under the key of the list; those of nested ones are not among them."""
    for key, value in tree.items():
        if key not in ("id2label", "label2id"):
            in_list = value if isinstance(value, list) else [value]
            yield from ((f"{at}{key}", item) for item in in_list if not isinstance(item, dict))
            if key.strip("_") in CODE and isinstance(value, dict):
                yield from ((f"{at}{key}", item) for item in value.values())


def most_of(name: str) -> int | None:
    """The largest number that a key of this name may have; None if it is no number of anything."""
    if _LABELS.fullmatch(name):
        return MOST_LABELS
    if _EXPERTS.fullmatch(name):
        return MOST_EXPERTS
    if name in DEPTHS or _MODULES.fullmatch(name):
        return MOST_LAYERS
    return LARGEST if name in POSITIVE or _SIZE.fullmatch(name) else None


def keys_of(built: PretrainedConfig) -> set[str]:
    """The keys that the class of ``built`` has, other names of the same values included."""
    kind = type(built)
    return {*vars(kind()), *kind.attribute_map, *getattr(kind, "__dataclass_fields__", ())}


def _unknown(tree: Mapping[str, Any], built: PretrainedConfig) -> Iterator[tuple[str, str]]:
    keys = keys_of(built)
    # Others were consumed by the class.
    unknown = [key for key, value in tree.items() if key not in keys and key in vars(built) and value is not None]
    if unknown:
        keys |= read_by_model(built)
    for key in unknown:
        if key not in keys:
            yield key, f"unknown key of {built.model_type}{nearest(key, keys)}"


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


def _impossible(tree: Mapping[str, Any], built: PretrainedConfig) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if key in POSITIVE and isinstance(value, int) and value < 1:
            yield key, f"must be a whole number >= 1 and <= {most_of(key)}"
        if key in ABOVE_0 and isinstance(value, int | float) and not value > 0:
            yield key, "must be > 0"
    sizes = {name: value for name in POSITIVE if isinstance(value := getattr(built, name, None), int) and value > 0}
    heads = next((sizes[name] for name in HEADS if name in sizes), 1)
    width = next((sizes[name] for name in WIDTHS if name in sizes), heads)
    derived = "head_dim" not in tree and sizes.get("head_dim", width // heads) == width // heads
    for key in tree:
        if key in HEADS and derived and width % heads:
            yield key, f"must divide the model's width, which is {width}"
        if key == GROUPS and key in sizes and heads % sizes[key]:
            yield key, f"must divide the number of heads, which is {heads}"
