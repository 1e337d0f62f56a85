"""Causal attention inside each document of packed rows, without a mask for every pair of tokens.

Transformers gives packed rows to torch's ``scaled_dot_product_attention`` with a mask, whose size is the square of
their length, and computes the pairs that it hides as well. Here each document is a call of its own, causal by itself,
and a window is computed in blocks; ``strategies/backends/ulysses.py`` does the same over ranks. Transformers knows it
by the name ``sdpa_varlen`` (``AttentionInterface``) and hands it the positions, as it does for flash attention: a
document begins where they restart.

Invariant. A token attends to the tokens that it attends to with a mask. Kernels sum rows of another length in another
order, so the numbers are equal to rounding. Calls with padding or a cache are plain attention with a mask.

Models that do not support flash attention are refused: their masks may say more than causality, a window and documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "sdpa_varlen"
BLOCK = 1024  # at least so many queries of a window at a time
# What some models ask for besides: a bound of the scores, a bias of each distance, and sinks (GPT-OSS's name for them).
_OTHER = ("softcap", "position_bias", "s_aux")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    sink: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in place of its own attention. Raise NotImplementedError for a model that asks for more
    than a scale, a window and dropout. ``sink``: first tokens of a document, seen beside a window.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if other := [name for name in _OTHER if kwargs.get(name) is not None]:
        raise NotImplementedError(
            f"attn_implementation: {NAME} cannot compute the {other[0]} of this model; write eager"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if attention_mask is not None or query.shape[2] != key.shape[2] or not causal:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, length = query.shape[0], query.shape[2]
    if position_ids is None:
        position_ids = torch.arange(length, device=query.device)[None]
    found = documents(position_ids.expand(rows, -1))
    return attend(query, key, value, found, sliding_window, scaling, dropout, sink).contiguous(), None


def mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """What Transformers calls to make a mask: there is none for rows without padding and without a cache."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None or q_length != kv_length:
        return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    if kwargs.get("use_vmap"):
        raise NotImplementedError(
            f"attn_implementation: {NAME} cannot apply the mask that this model defines; write eager"
        )
    return None


def register() -> None:
    """Let Transformers know the attention by its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def documents(positions: Tensor) -> Tensor:
    """Row, start and stop of each document as [1, 1, documents, 3]; none if every row is one document."""
    rows, length = positions.shape
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    starts = begins.flatten().nonzero().squeeze(1)
    stops = torch.cat([starts[1:], starts.new_tensor([rows * length])])
    found = torch.stack([starts // length, starts % length, (stops - 1) % length + 1], dim=1)
    return found[: 0 if len(found) == rows else None].view(1, 1, -1, 3)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    window: int | None,
    scaling: float | None,
    dropout: float = 0.0,
    sink: int = 0,
) -> Tensor:
    """Causal attention inside each document, of [rows, heads, tokens, width] as [rows, tokens, heads, width]."""
    if documents.shape[2] == 0:
        return causal(query, key, value, window, scaling, dropout, sink).transpose(1, 2)
    sizes: list[list[int]] = [[] for _ in query]
    for row, start, stop in documents[0, 0].tolist():
        sizes[row].append(stop - start)
    found = []
    for *row, lengths in zip(query.unbind(), key.unbind(), value.unbind(), sizes, strict=True):
        # Slices one by one would each have a gradient of the whole row.
        for one, keys, values in zip(*(each.split(lengths, dim=1) for each in row), strict=True):
            each = causal(one[None], keys[None], values[None], window, scaling, dropout, sink)
            found.append(each[0].transpose(0, 1))
    whole: Tensor = torch.cat(found).unflatten(0, (len(query), -1))
    return whole


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
    dropout: float = 0.0,
    sink: int = 0,
) -> Tensor:
    """Causal attention over whole rows, or over the last ``window`` tokens and the first ``sink``."""
    length, times = query.shape[2], query.shape[1] // key.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=times > 1
        )
    if times > 1:
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
    found, step = [], max(window, BLOCK)
    for start in range(0, length, step):
        seen = slice(max(0, start - window + 1), min(length, start + step))
        first = min(sink, seen.start)
        of = torch.arange(start, seen.stop, device=query.device)[:, None]
        to = torch.arange(seen.start - first, seen.stop, device=query.device)
        to[:first] -= seen.start - first
        shown = (to <= of) & ((to > of - window) | (to < sink))
        block, keys, values = query[:, :, start : seen.stop], key[:, :, seen], value[:, :, seen]
        if first:
            keys, values = (torch.cat([whole[:, :, :first], part], 2) for whole, part in ((key, keys), (value, values)))
        found.append(
            scaled_dot_product_attention(block, keys, values, attn_mask=shown, scale=scaling, dropout_p=dropout)
        )
    return torch.cat(found, dim=2)
