"""A mask of a window and of first tokens: block-sparse causal attention, by Transformers' own points of extension.

A token sees itself, the ``window`` - 1 tokens before it, and the first ``sink`` tokens of its document. For each
kernel, window and sink Transformers is told of an attention and of a mask by a name of their own
(``AttentionInterface``, ``AttentionMaskInterface``). With ``sdpa`` the mask is a tensor for every pair of tokens, with
``flex_attention`` blocks of 128 x 128 pairs, of which empty ones are not computed, and ``sdpa_varlen`` computes blocks
of its own, without a mask.

Invariant. Every mask that the model asks Transformers for is the causal one, of packed rows and with padding too, and
has this one on top. A model that asks for another one (a window of its own, chunks, both directions, images), or that
computes attention without asking, ends in NotImplementedError: never is a token trained on others than those named.

The mask of Transformers knows documents, and this one asks it: a token is one of the first ``sink`` of its document if
it does not see the one ``sink`` places before. With padding, which may be on the left, tokens are counted instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from strategies.backends import varlen

OWN = "cannot go with model.attention_mask: layers of this model have masks of their own; leave it out"
UNASKED = "cannot go with model.attention_mask: this model computes attention without asking for a mask; leave it out"
Visible = Callable[[Any, Any, Any, Any], Any]  # of numbers of row, head, query and key: whether the key is seen


def register(kernel: str, window: int, sink: int) -> str:
    """Let Transformers know the ``kernel`` (sdpa, sdpa_varlen or flex_attention) with this mask; the name it has."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flex_attention_mask, sdpa_mask

    name = f"{kernel}-window-{window}-sink-{sink}"
    if kernel == varlen.NAME:
        AttentionInterface.register(name, partial(_varlen, window, sink))
        AttentionMaskInterface.register(name, partial(_mask, varlen.mask, window, sink))
    else:
        AttentionInterface.register(name, partial(_masked, kernel))
        made = flex_attention_mask if kernel == "flex_attention" else sdpa_mask
        AttentionMaskInterface.register(name, partial(_mask, made, window, sink))
    return name


def seen(causal: Visible, window: int, sink: int, padding: Tensor | None = None) -> Visible:
    """What is seen on top of ``causal``, which knows documents. ``padding``: [rows, keys], true where a token is."""
    places = padding.long().cumsum(-1) if padding is not None else None

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        near = query - key < window
        if sink == 0:
            return near
        if places is not None:
            return near | (places[row, key] <= sink)
        return near | (key < sink) | ~causal(row, head, key, (key - sink).clamp(min=0))

    return visible


def _mask(
    made: Callable[..., Any],
    window: int,
    sink: int,
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
    """What Transformers calls to make a mask: ``made`` of its function and ours. NotImplementedError: not causal."""
    from transformers.masking_utils import and_masks, prepare_padding_mask

    if local_size is not None or use_vmap or allow_is_bidirectional_skip is not None:
        raise NotImplementedError(OWN)
    ours = seen(mask_function, window, sink, prepare_padding_mask(attention_mask, kv_length, kv_offset))
    return made(
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=and_masks(mask_function, ours),
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
