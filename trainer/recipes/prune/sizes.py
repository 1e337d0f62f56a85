"""A model with fewer channels, heads or layers: its configuration, and which rows and columns of each weight it keeps.

Invariant. The logits of the smaller model are those of the large one in which what goes adds nothing: the columns of
``down_proj`` for channels, those of ``o_proj`` for heads, both for all of a layer. Only sums have fewer terms.

Each layer keeps as many channels and heads as every other, since a configuration has one number for all. Channels that
stay are a multiple of 8, for kernels, if there were one before. A head goes with its whole group: the heads that
read the same key and value, and these.

Refused, by the configuration alone: families other than ``FAMILIES``, whose configuration cannot say it, or of which
no test has shown the invariant; numbers of heads that the family does not take; shares of which nothing goes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from deepstow.trainer.model.shrink import PER_LAYER
from deepstow.trainer.recipes.prune import asked_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.recipes.prune import PruneSection

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
ALIGN = 8
PARTS = ("channels", "heads")  # that go if none are named


class Sizes(NamedTuple):
    """How many there are, or stay: ``channels`` and ``groups`` of heads in each of ``layers``."""

    channels: int
    groups: int
    layers: int


class Kept(NamedTuple):
    """What stays: numbers of layers of the large model, and of each its channels and groups, in order."""

    layers: list[int]
    channels: dict[int, Tensor]
    groups: dict[int, Tensor]


def sizes_of(built: PretrainedConfig) -> Sizes:
    """What a model of this configuration has."""
    return Sizes(built.intermediate_size, built.num_key_value_heads, built.num_hidden_layers)


def staying(section: PruneSection, whole: Sizes) -> Sizes:
    """How much of ``whole`` stays: at least one of each, and never fewer than the share asks for."""
    parts = section.parts or PARTS

    def left(part: str, number: int) -> int:
        return number - int(section.sparsity * number + 1e-9) if part in parts else number

    channels = left("channels", whole.channels)
    if whole.channels % ALIGN == 0:
        channels = -(-channels // ALIGN) * ALIGN
    return Sizes(channels, left("heads", whole.groups), left("layers", whole.layers))


def smaller(config: RunConfig, built: PretrainedConfig) -> PretrainedConfig:
    """``built`` with the sizes that stay. ConfigError: see the module."""
    section, family = asked_of(config), built.model_type
    if family not in FAMILIES:
        what = f"a {family} model cannot be made smaller so; it can be done for {', '.join(FAMILIES)}"
        raise config.error("prune.method", section.method, what)
    full = sizes_of(built)
    stay = staying(section, full)
    parts = section.parts or PARTS
    names = ("channels", "heads", "layers")
    for part, before, after in zip(names, full, stay, strict=True):
        if part in parts and before == after:
            counted = "groups of heads" if part == "heads" else part
            hint = f"write {_up(1 / before)} or more" if before > 1 and part != "channels" else "write more"
            what = f"none of {before} {counted} would go; {hint}, or leave {part} out of prune.parts"
            raise config.error("prune.sparsity", section.sparsity, what)
    if stay.layers < full.layers and (kinds := set(getattr(built, PER_LAYER[0], None) or ())) and len(kinds) > 1:
        what = f"its layers are of several kinds ({', '.join(sorted(kinds))}), and each would go for another reason"
        raise config.error("prune.parts", section.parts, f"{what}; leave layers out")
    resized = _resized(built, full, stay)
    if resized is None:
        better = next((n for n in range(stay.groups - 1, 0, -1) if _resized(built, full, stay._replace(groups=n))), 0)
        per_group = built.num_attention_heads // full.groups
        took = f"{stay.groups * per_group} of {built.num_attention_heads} heads would stay, which {family} models of "
        took += f"hidden_size {built.hidden_size} cannot have in Transformers"
        cure = f"{_up(1 - better / full.groups)} keeps {better * per_group}, or " if better else ""
        raise config.error("prune.sparsity", section.sparsity, f"{took}; {cure}leave heads out of prune.parts")
    return resized


def _up(share: float) -> str:
    """With two digits, rounded up, so that it takes as much."""
    return f"{math.ceil(100 * share - 1e-9) / 100:.2f}"


def _resized(built: PretrainedConfig, whole: Sizes, stay: Sizes) -> PretrainedConfig | None:
    """``built`` with other sizes; None if its class does not take them."""
    from huggingface_hub.errors import StrictDataclassError

    tree = built.to_dict()
    heads = built.num_attention_heads // whole.groups * stay.groups
    size = getattr(built, "head_dim", None) or built.hidden_size // built.num_attention_heads
    tree |= {"intermediate_size": stay.channels, "num_hidden_layers": stay.layers, "head_dim": size}
    tree |= {"num_attention_heads": heads, "num_key_value_heads": stay.groups}
    tree |= {name: tree[name][: stay.layers] for name in PER_LAYER if tree.get(name)}
    try:
        return type(built).from_dict(tree)
    except (StrictDataclassError, ValueError):
        return None


# --- weights, by their names in the families above -------------------------------------------------------------------

_IN_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.+)\.(weight|bias)")
_ROWS = {"mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
_COLUMNS = {"mlp.down_proj", "self_attn.o_proj"}


def cut(state: Mapping[str, Tensor], kept: Kept, built: PretrainedConfig) -> dict[str, Tensor]:
    """The smaller model's weights, of the large one's ``state`` and configuration."""
    size = getattr(built, "head_dim", None) or built.hidden_size // built.num_attention_heads
    shared = built.num_attention_heads // built.num_key_value_heads
    place = {old: new for new, old in enumerate(kept.layers)}
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None:
            weights[name] = tensor
            continue
        prefix = in_layer[1]
        layer = int(in_layer[2])
        module = in_layer[3]
        kind = in_layer[4]
        if layer not in place:
            continue
        if (module in _ROWS) or (module in _COLUMNS and kind == "weight"):
            of_heads = size * (1 if module.endswith(("k_proj", "v_proj")) else shared)
            index = kept.channels[layer] if "mlp" in module else _spread(kept.groups[layer], of_heads)
            tensor = tensor.index_select(0 if module in _ROWS else 1, index.to(tensor.device))
        weights[f"{prefix}{place[layer]}.{module}.{kind}"] = tensor
    return weights


def _spread(groups: Tensor, size: int) -> Tensor:
    """The rows of ``groups`` of so many rows each."""
    import torch

    return (groups[:, None] * size + torch.arange(size)).flatten()
