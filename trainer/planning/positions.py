"""How many places of a row a model knows, and rows that may be longer.

Where each place has a vector of its own (BERT, GPT-2, BART), or a line in a table (GPT-J), a longer row ends in an
index error, but not on the fake tensors that a plan is made with; so it is refused. Rotary embeddings are computed for
any place: the row trains, at places that the model was not made for, which a line says. Models of relative or no
positions say no number, and nothing is said about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deepstow.trainer.config.yaml_file import error_line
from deepstow.trainer.errors import warning

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from deepstow.trainer.config.sections import RunConfig


def refuse(config: RunConfig, model: Any) -> None:
    """Raise ConfigError if ``model`` has too few vectors for the longest rows."""
    limit = declared(model.config)
    tables = list(_tables(model))
    if not limit or not tables:
        return
    most = min(limit, *tables)
    for key in ("max_length", "max_target_length"):
        length = getattr(config.data, key)
        if length is not None and length > most:
            raise config.error(f"data.{key}", length, f"the model has {most} positions; write {most} or less")


def _tables(model: Any) -> Iterator[int]:
    """The places of each table of positions. RoBERTa and its like count from the one after their padding."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe")):
            yield module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_positions"):
            yield len(buffer)


def declared(model: PretrainedConfig) -> int:
    """The places that a model's configuration says; 0 if it says none. MPT has a table of biases, and its own name."""
    text = model.get_text_config()
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or 0


def made_for(model: PretrainedConfig) -> int:
    """The same with what a scaling of rotary embeddings adds."""
    text, most = model.get_text_config(), declared(model)
    raw = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    ropes = [rope for rope in (raw, *raw.values()) if isinstance(rope, dict)]  # one, or one for each kind of layer
    reached = (
        rope["factor"] * (rope.get("original_max_position_embeddings") or most) for rope in ropes if "factor" in rope
    )
    return int(max((most, *reached)))


def beyond(config: RunConfig, most: int) -> list[str]:
    """A line if rows may be longer than the ``most`` places that the model is made for; 0: any."""
    length = config.data.max_length
    if not most or length <= most:
        return []
    what = (
        f"the model is made for {most} positions (max_position_embeddings); longer rows are trained on at places that "
        f"it does not know, and other programs may cut them there; write {most} or less, unless that is what you mean"
    )
    return [warning(config.located("data.max_length", error_line(("data", "max_length"), length, what)))]
