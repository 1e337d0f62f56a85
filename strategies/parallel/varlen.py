"""Causal attention inside each document of packed rows, without a mask for every pair of tokens.

Transformers gives packed rows to torch's ``scaled_dot_product_attention`` with a mask, whose size is the square of
their length, and computes the pairs that it hides as well. Here each document is a call of its own, causal by itself,
and a window is computed in blocks; ``strategies/parallel/ulysses.py`` does the same over ranks. On a GPU, in 16 bits,
torch's FlashAttention for rows of any length computes all documents in one call. Transformers knows it by the name
``sdpa_varlen`` (``AttentionInterface``) and hands it the positions, as it does for flash attention: a document begins
where they restart.

[Note: waits] How long documents are decides which calls are made, so the host has to know it. Positions on a device
would have to be read there, and the host would wait for all that was queued. So the collator says it beside the
positions (``Documents``), Transformers hands that to every layer, and nothing waits. A batch without it is read once,
before the first layer, by a hook of the model (``prepare``). Transformers, too, reads positions before it makes a mask;
the hook gives it an empty one, which it passes on as it is.

Invariant. A token attends to the tokens that it attends to with a mask. Kernels sum rows of another length in another
order, so the numbers are equal to rounding. Calls with padding or a cache are plain attention with a mask.

Models that do not support flash attention are refused: their masks may say more than causality, a window and documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

NAME = "sdpa_varlen"
DOCUMENTS = "documents"  # the key of a batch, and the argument of every attention
BLOCK = 1024  # at least so many queries of a window at a time
# What some models ask for besides: a bound of the scores, a bias of each distance, and sinks (GPT-OSS's name for them).
_OTHER = ("softcap", "position_bias", "s_aux")


@dataclass(frozen=True)
class Documents:
    """How long the documents of packed rows are, known to the host.

    Args:
        lengths: tokens of each document, row by row; those of a row add up to its length.
        offsets: where documents begin and end in all rows together, int32 [documents + 1] on a GPU.
    """

    lengths: tuple[tuple[int, ...], ...]
    offsets: Tensor | None = None

    @classmethod
    def at(cls, positions: Tensor) -> Documents:
        """Of ``positions`` [rows, tokens], which go up by one inside a document. Waits for a device that has them."""
        begins, length = positions.cpu().diff(dim=1) != 1, positions.shape[1]
        starts = ([0, *(row.nonzero().flatten() + 1).tolist(), length] for row in begins)
        return cls(tuple(tuple(stop - start for start, stop in pairwise(row)) for row in starts))

    @property
    def are_rows(self) -> bool:
        """Whether each row is one document."""
        return all(len(row) == 1 for row in self.lengths)

    def of_rows(self, start: int, stop: int) -> Documents:
        """Those of some rows."""
        first, last = (sum(map(len, self.lengths[:row])) for row in (start, stop))
        ends = None if self.offsets is None else self.offsets[first : last + 1] - self.offsets[first]
        return Documents(self.lengths[start:stop], ends)

    def padded(self, more: int) -> Documents:
        """With a document of so many tokens at the end of each row."""
        return Documents(tuple((*row, more) for row in self.lengths)) if more else self

    def to(self, device: torch.device | str | int, non_blocking: bool = True) -> Documents:
        """As a tensor's, so that whoever moves a batch moves this: with ``offsets`` on a GPU. Nothing waits for it."""
        target = torch.empty(0, device=device)
        if not target.is_cuda or (self.offsets is not None and self.offsets.device == target.device):
            return self
        ends = torch.tensor([0, *accumulate(chain.from_iterable(self.lengths))], dtype=torch.int32)
        return replace(self, offsets=ends.pin_memory().to(target.device, non_blocking=True))


def prepare(model: Any) -> None:
    """Let forward of ``model`` tell its layers how long documents are, and ask for no mask of packed rows, see [Note:
    waits]. What it asks of masks besides is not seen any more; counting it for the plan, before this, sees that.
    """
    model.base_model.register_forward_pre_hook(_before_layers, with_kwargs=True)


def _before_layers(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    positions = kwargs.get("position_ids")
    tokens = next((kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None), None)
    if positions is None or positions.dim() != 2 or tokens is None:
        return None
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    documents = kwargs.get(DOCUMENTS) or Documents.at(positions.expand(len(tokens), -1))
    return args, {**kwargs, DOCUMENTS: documents.to(tokens.device), "attention_mask": no_mask(tokens.device)}


def no_mask(device: torch.device) -> Tensor:
    """A mask that Transformers passes on as it is, in place of none, and that says nothing."""
    return torch.empty(1, 1, 0, 0, device=device)


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
    documents: Documents | None = None,
    sink: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in place of its own attention. Raise NotImplementedError for a model that asks for more
    than a scale, a window and dropout. ``documents``: if not given, those that ``position_ids`` say. ``sink``: first
    tokens of a document, seen beside a window.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if unsupported := [name for name in _OTHER if kwargs.get(name) is not None]:
        raise NotImplementedError(
            f"attn_implementation: {NAME} cannot compute the {unsupported[0]} of this model; write eager"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    masked = attention_mask is not None and attention_mask.numel() > 0
    if masked or query.shape[2] != key.shape[2] or not causal:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask if masked else None, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, length = query.shape[0], query.shape[2]
    if documents is None:
        documents = Documents(((length,),) * rows)
        if position_ids is not None:
            documents = Documents.at(position_ids.expand(rows, -1))
    return attend(query, key, value, documents, sliding_window, scaling, dropout, sink).contiguous(), None


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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    window: int | None,
    scaling: float | None,
    dropout: float = 0.0,
    sink: int = 0,
) -> Tensor:
    """Causal attention inside each document, of [rows, heads, tokens, width] as [rows, tokens, heads, width]."""
    if [sum(row) for row in documents.lengths] != [query.shape[2]] * len(query):
        raise ValueError(f"documents are not of these {len(query)} rows of {query.shape[2]} tokens")
    if documents.are_rows:
        return causal(query, key, value, window, scaling, dropout, sink).transpose(1, 2)
    rounded = _autocast(query, key, value)
    if not dropout and not sink and _takes_any_length(*rounded):
        return _in_one_call(*rounded, documents, window, scaling)
    attended = []
    for *row, lengths in zip(query.unbind(), key.unbind(), value.unbind(), documents.lengths, strict=True):
        # Slices one by one would each have a gradient of the whole row.
        for queries, keys, values in zip(*(tensor.split(lengths, dim=1) for tensor in row), strict=True):
            output = causal(queries[None], keys[None], values[None], window, scaling, dropout, sink)
            attended.append(output[0].transpose(0, 1))
    joined: Tensor = torch.cat(attended).unflatten(0, (len(query), -1))
    return joined


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As autocast gives them to attention on a GPU; the kernel for rows of any length is none that it knows."""
    if not (query.is_cuda and torch.is_autocast_enabled(query.device.type)):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _takes_any_length(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention takes these, [rows, heads, tokens, width]: 16 bits, on a GPU that it has code for.
    Called with whole rows torch pads the width to a multiple of 8, with documents it does not.
    """
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, query.shape[1] != key.shape[1]))


def _in_one_call(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, scaling: float | None
) -> Tensor:
    """``attend`` by torch's kernel for rows of any length, which has no dropout."""
    from torch.nn.attention import varlen

    kernel: Any = varlen.varlen_attn  # with other arguments in each release
    offsets = documents.to(query.device).offsets
    longest = max(chain.from_iterable(documents.lengths))
    # A release without this argument does not compare the numbers of heads; the kernel is the same.
    says_so = "enable_gqa" in signature(kernel).parameters
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if says_so else {}
    attended = kernel(
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        offsets,
        offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    joined: Tensor = attended.unflatten(0, (len(query), -1))
    return joined


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
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    attended, step = [], max(window, BLOCK)
    for start in range(0, length, step):
        seen = slice(max(0, start - window + 1), min(length, start + step))
        first = min(sink, seen.start)
        of = torch.arange(start, seen.stop, device=query.device)[:, None]
        to = torch.arange(seen.start - first, seen.stop, device=query.device)
        to[:first] -= seen.start - first
        shown = (to <= of) & ((to > of - window) | (to < sink))
        block = query[:, :, start : seen.stop]
        keys = key[:, :, seen]
        values = value[:, :, seen]
        if first:
            keys, values = (torch.cat([whole[:, :, :first], part], 2) for whole, part in ((key, keys), (value, values)))
        attended.append(
            scaled_dot_product_attention(block, keys, values, attn_mask=shown, scale=scaling, dropout_p=dropout)
        )
    return torch.cat(attended, dim=2)
