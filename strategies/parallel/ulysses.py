"""Attention over ranks that each have a slice of every row (DeepSpeed-Ulysses), and those slices.

Between attentions a rank has all heads of its slice of the tokens. An attention needs all tokens of a head. So the
function that is registered with Transformers (``AttentionInterface``) exchanges queries, keys and values of all heads
for those of all tokens in 1 / N of the heads, computes these with torch's kernel, and exchanges the result back:

    [rows, heads, tokens / N]  ->  all to all  ->  [rows, heads / N, tokens]  ->  attention  ->  all to all  ->  back

Key-value heads that N does not divide are sent as often as it takes, at most once for each of their queries.

Invariant. A token attends to the tokens that it attends to in plain training. Masks are not built, which would take
memory for every pair of tokens: how long documents are travels beside the batch (``varlen.Documents``), and each
document is causal by itself, as in ``varlen.py``. A call that does not say it (generation, the comparison of an export)
is plain attention on whole rows.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023. DeepSpeed's own needs its engine, and under Accelerate it logged
gradient norms of another scale than plain training.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad

from deepstow.strategies.parallel import varlen

if TYPE_CHECKING:
    from deepstow.strategies.core.grid import Grid

MASKED = -100  # the label of a token that is not trained on


class _AllToAll(torch.autograd.Function):
    """Part i of [ranks, ...] goes to rank i. Its derivative is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None


class Ulysses:
    """The attention function and the slices of rank ``place`` of ``degree``. Without a ``group`` nothing is sent, and
    shapes are right, to be counted.
    """

    def __init__(self, degree: int, place: int, group: distributed.ProcessGroup | None) -> None:
        self.degree = degree
        self.place = place
        self.group = group

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        documents: varlen.Documents | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As Transformers' attention functions; ``documents`` are of ``slice_of``, or this is plain attention."""
        if documents is None:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        times = lcm(key.shape[1], self.degree) // key.shape[1]
        if times > 1:
            key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        parts = [tensor.unflatten(1, (self.degree, -1)).movedim(1, 0) for tensor in (query, key, value)]
        heads = [part.shape[2] for part in parts]
        received = self._exchange(torch.cat(parts, dim=2)).movedim(0, 2).flatten(2, 3)
        query, key, value = received.split(heads, dim=1)
        attended = varlen.attend(query, key, value, documents, sliding_window, scaling).transpose(1, 2)
        back = self._exchange(attended.unflatten(2, (self.degree, -1)).movedim(2, 0))
        return back.movedim(0, 1).flatten(1, 2).transpose(1, 2).contiguous(), None

    def _exchange(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        return parts if self.group is None else _AllToAll.apply(parts, self.group)  # type: ignore[no-any-return]

    def slice_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is given of whole rows: this rank's tokens with their positions in the row, and the token that
        follows each as its label. A row that does not divide gets some more padding, a document of its own.

        Padding on the right is left to causality: no token before it attends to it, and it has no label.
        """
        ids, positions = batch["input_ids"], batch.get("position_ids")
        rows, length = ids.shape
        more = -length % self.degree
        if positions is None:
            documents = varlen.Documents(((length + more,),) * rows)
            positions = torch.arange(length + more, device=ids.device).expand(rows, -1)
        else:
            restarted = torch.arange(more, device=ids.device).expand(rows, -1)
            positions = torch.cat([positions, restarted], dim=1)
            documents = (batch.get(varlen.DOCUMENTS) or varlen.Documents.at(batch["position_ids"])).padded(more)
        labels = pad(batch["labels"][:, 1:], (0, 1 + more), value=MASKED)
        width = (length + more) // self.degree
        mine = {"input_ids": pad(ids, (0, more)), "position_ids": positions, "labels": labels, "shift_labels": labels}
        place = slice(self.place * width, (self.place + 1) * width)
        inputs: dict[str, Any] = {name: tensor[:, place].contiguous() for name, tensor in mine.items()}
        return {**inputs, varlen.DOCUMENTS: documents.to(ids.device), "attention_mask": varlen.no_mask(ids.device)}

    def sum(self, number: Tensor) -> Tensor:
        """The sum over the slices of a row; a collective."""
        distributed.all_reduce(number, group=self.group)
        return number


def register(model: Any, attention: Ulysses, name: str) -> None:
    """Let ``model`` compute its attention by ``attention``, which Transformers knows by ``name``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # of calls on whole rows
    model.set_attn_implementation(name)


def start(model: Any, grid: Grid) -> None:
    """Make the groups of ranks that share rows, and let ``model`` compute its attention over this rank's; a collective.

    Models whose attention is over the same ranks share the name, and need not be kept apart.
    """
    rank = distributed.get_rank()
    groups = {tuple(ranks): distributed.new_group(ranks) for ranks in grid.groups("slice")}
    (mine,) = (ranks for ranks in groups if rank in ranks)
    attention = Ulysses(grid.slices, mine.index(rank), groups[mine])
    register(model, attention, f"ulysses-{'-'.join(map(str, mine))}")


def count(model: Any, degree: int) -> Ulysses:
    """Let ``model`` compute the attention of one of ``degree`` ranks without others, to be counted."""
    attention = Ulysses(degree, 0, None)
    register(model, attention, f"ulysses-counted-{degree}")
    return attention


def of(model: Any) -> Ulysses:
    """The attention of a model that was started."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    assert isinstance(attention, Ulysses)
    return attention
