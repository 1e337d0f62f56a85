"""A mask of a window, of first tokens and of blocks: block-sparse causal attention, by Transformers' own points of
extension.

A token sees itself, the ``window`` - 1 tokens before it, and the first ``sink`` tokens of its document. Besides, with
``strided`` every so-many-th block of tokens back, as in the Sparse Transformer: blocks are counted from the token, so
that where a document begins in a row changes nothing. With ``random``, as in BigBird, blocks that are chosen by a hash
of the seed and the number of its own block in the document: the same in every layer and run, for any length. That
number is not known in packed rows, so the config refuses these.

For each kernel and mask Transformers is told of an attention and of a mask by a name of their own
(``AttentionInterface``, ``AttentionMaskInterface``). With ``sdpa`` the mask is a tensor for every pair of tokens, with
``flex_attention`` blocks of 128 x 128 pairs, of which empty ones are not computed, and ``sdpa_varlen`` computes blocks
of its own, without a mask: of a window and first tokens alone.

Invariant. Every mask that the model asks Transformers for is the causal one, of packed rows and with padding too, and
has this one on top. A model that asks for another one (a window of its own, chunks, both directions, images), or that
computes attention without asking, ends in NotImplementedError: never is a token trained on others than those named.

The mask of Transformers knows documents, and this one asks it: a token is one of the first ``sink`` of its document if
it does not see the one ``sink`` places before. With padding, which may be on the left, tokens are counted instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from deepstow.strategies.parallel import varlen

OWN = "cannot go with model.attention_mask: layers of this model have masks of their own; leave it out"
UNASKED = "cannot go with model.attention_mask: this model computes attention without asking for a mask; leave it out"
Visible = Callable[[Any, Any, Any, Any], Any]  # of numbers of row, head, query and key: whether the key is seen
Shown = Mapping[str, Any]  # model.attention_mask, without what is left out of it
BITS, MULTIPLIERS = (1 << 32) - 1, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # of the hash: large primes


def register(kernel: str, shown: Shown) -> str:
    """Let Transformers know the ``kernel`` (sdpa, sdpa_varlen or flex_attention) with a mask; the name it has."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flex_attention_mask, sdpa_mask

    name = "-".join((kernel, *re.findall(r"\w+", str(shown))))  # sdpa-window-64-sink-4
    if kernel == varlen.NAME:
        assert shown.keys() == {"window", "sink"}, "its blocks are of a window"
        AttentionInterface.register(name, partial(_varlen, shown["window"], shown["sink"]))
        AttentionMaskInterface.register(name, partial(_mask, varlen.mask, shown))
    else:
        AttentionInterface.register(name, partial(_masked, kernel))
        make = flex_attention_mask if kernel == "flex_attention" else sdpa_mask
        AttentionMaskInterface.register(name, partial(_mask, make, shown))
    return name


def seen(causal: Visible, shown: Shown, padding: Tensor | None = None) -> Visible:
    """What is seen on top of ``causal``, which knows documents. ``padding``: [rows, keys], true where a token is."""
    places = padding.long().cumsum(-1) if padding is not None else None
    window = shown["window"]
    sink = shown["sink"]
    strided = shown.get("strided")
    random = shown.get("random")

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        near = query - key < window
        if strided is not None:
            near = near | ((query - key) // strided["block"] % strided["every"] == 0)
        if random is not None:
            numbers = (query, key) if places is None else (places[row, query] - 1, places[row, key] - 1)
            near = near | _chosen(random, *(number // random["block"] for number in numbers))
        if sink == 0:
            return near
        if places is not None:
            return near | (places[row, key] <= sink)
        return near | (key < sink) | ~causal(row, head, key, (key - sink).clamp(min=0))

    return visible


def _chosen(random: Mapping[str, int], query: Any, key: Any) -> Any:
    """Whether the block ``key`` is one of those chosen for the block ``query``, which are all before it."""
    chosen = query < 0
    for draw in range(random["number"]):
        mixed = query + 1
        for number, factor in zip((random["seed"], draw, 0), MULTIPLIERS, strict=True):
            mixed = ((mixed + number) * factor) & BITS
            mixed = mixed ^ (mixed >> 15)
        chosen = chosen | ((query > 0) & (key == mixed % query.clamp(min=1)))
    return chosen


def _mask(
    make: Callable[..., Any],
    shown: Shown,
    *,
    kv_length: int,
    mask_function: Visible,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Transformers calls it to make a mask: its own ``make``, of both functions. NotImplementedError: not causal."""
    from transformers.masking_utils import and_masks, prepare_padding_mask

    if local_size is not None or use_vmap or allow_is_bidirectional_skip is not None:
        raise NotImplementedError(OWN)
    visible = seen(mask_function, shown, prepare_padding_mask(attention_mask, kv_length, kv_offset))
    return make(
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=and_masks(mask_function, visible),
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **kwargs,
    )


def _masked(kernel: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Transformers' own attention, which has to get a mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if mask is None:
        raise NotImplementedError(UNASKED)
    return ALL_ATTENTION_FUNCTIONS[kernel](module, query, key, value, mask, **kwargs)


def _varlen(
    window: int, sink: int, module: nn.Module, *given: Any, sliding_window: int | None = None, **kwargs: Any
) -> Any:
    """Attention in blocks; with a mask, of padding or a cache, this one is in it."""
    if sliding_window is not None:
        raise NotImplementedError(OWN)
    return varlen.attention(module, *given, **kwargs | {"sliding_window": window, "sink": sink})
