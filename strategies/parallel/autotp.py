"""DeepSpeed's tensor parallelism (AutoTP): which weights it divides, and of which models, as plain data.

DeepSpeed is told which layers to divide, by the names below, instead of guessing it; the plan counts with the same
names. In a block the first layers of attention and MLP are divided by columns (rows of ``weight``: whole heads, whole
neurons) and the last ones by rows, so that ranks exchange once after attention and once after the MLP, and as often in
backward:

    columns   q_proj k_proj v_proj, gate_proj up_proj, fc1     weight and bias have 1/degree of their rows
    rows      o_proj out_proj, down_proj fc2                   weight has 1/degree of its columns; the bias is whole
    head      lm_head, unless it is tied                       rows, and the logits are gathered
    whole     embeddings, norms, a tied head                   the same on all ranks, updated alike on each
    summed    q_norm k_norm                                    whole; each rank has the gradient of its heads only
              where ranks have slices of the tokens (``scattered.py``), all norms and the biases of rows, too

Low-rank adapters (PEFT's names) follow the layer that they are added to, so that what ranks exchange for them is as
wide as their rank, in the direction in which the layer exchanges its hidden states (``tensor_adapters.py``):

    columns   lora_A whole, lora_B by columns                  the gradient between the two is summed
    rows      lora_A by rows, lora_B whole                     what is between the two is summed
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from math import gcd
from typing import Any

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
ROWS = ("o_proj", "out_proj", "down_proj", "fc2")
HEAD = "lm_head"
SUMMED = ("q_norm", "k_norm")
OF_SLICES = (*SUMMED, "input_layernorm", "post_attention_layernorm", "norm")
WRAPPED = r"(?:base_model\.model\.)?"  # by PEFT
# Architectures that train as without it (tests/parity/test_tensor.py), by Hugging Face's model_type.
MODELS = ("llama", "mistral", "opt", "qwen2", "qwen3")
IN_SLICES = ("llama", "mistral", "qwen2", "qwen3")  # of these, where ranks have slices of the tokens
WHY: Mapping[str, str] = {
    "gpt2": "GPT-2 has queries, keys and values in one Conv1D, which AutoTP does not divide",
    "mixtral": "the experts of Mixtral are weights of three dimensions, which AutoTP does not divide",
}
# What every rank has a whole number of, by the key of the model's configuration.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "ffn_dim")


class Cut(Enum):
    """How a linear layer is divided."""

    COLUMNS = "columns"
    ROWS = "rows"
    GATHERED = "columns, outputs gathered"


def listed(words: Sequence[str]) -> str:
    """2, 3 or 6"""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def cut_of(name: str, *, tied: bool) -> Cut | None:
    """How the linear layer of that name is divided; None: it is whole. ``tied``: the head shares the embedding."""
    if re.fullmatch(rf"{_named(COLUMNS)}(?:\.base_layer|\.lora_B\.default)?", name):
        return Cut.COLUMNS
    if re.fullmatch(rf"{_named(ROWS)}(?:\.base_layer|\.lora_A\.default)?", name):
        return Cut.ROWS
    return Cut.GATHERED if re.fullmatch(WRAPPED + HEAD, name) and not tied else None


def _named(layers: tuple[str, ...]) -> str:
    return rf".*\.(?:{'|'.join(layers)})"


def partition(*, tied: bool, frozen: bool, in_slices: bool = False) -> dict[str, Any]:
    """What DeepSpeed is told besides the degree, as JSON. ``frozen``: the base of adapters has no gradients to sum;
    ``in_slices``: ranks have slices of the tokens between divided layers.
    """

    def spec(layers: str, kind: str, of: str = "weight", **more: bool) -> dict[str, Any]:
        return {"patterns": [rf"{layers}\.{of}$"], "partition_type": kind, **more}

    specs = [spec(_named(COLUMNS), "column"), spec(_named(ROWS), "row")]
    specs += [] if frozen else [spec(_named(OF_SLICES if in_slices else SUMMED), "skip", grad_allreduce=True)]
    specs += [spec(_named(ROWS), "skip", "bias", grad_allreduce=True)] if in_slices else []
    specs += [] if tied else [spec(WRAPPED + HEAD, "column", gather_output=True)]
    return {"vocab_parallel_lm_head": False, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def complaints(model: Mapping[str, Any], degree: int) -> Iterator[str]:
    """Why a model with this configuration cannot be divided, one line each; with what could be written instead."""
    kind = model.get("model_type")
    if kind not in MODELS:
        why = WHY.get(str(kind), f"{kind} was not compared with plain training")
        yield f"{why}; architectures that can be divided: {', '.join(MODELS)}; others with strategies.zero alone"
        return
    sizes = {key: size for key in DIVIDED if isinstance(size := model.get(key), int)}
    fits = [str(count) for count in range(2, gcd(*sizes.values()) + 1) if not gcd(*sizes.values()) % count]
    for key, size in sizes.items():
        if size % degree:
            instead = f"write {listed(fits)}" if fits else "no degree divides all of its sizes; leave it out"
            yield f"must divide model.config.{key}, which is {size}; {instead}"
