"""One rank's part of a model under tensor parallelism, without storage, to be counted like a whole model.

The linear layers that DeepSpeed's AutoTP divides (``strategies/parallel/autotp.py``) get the shapes that they have on
the first rank, which has the most where a size does not divide. What exchanges need for a moment is not counted; they
keep nothing for backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepstow.strategies.parallel import scattered
from deepstow.strategies.parallel.autotp import Cut, cut_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GatheredHead(nn.Linear):
    """A head whose logits are put together from those of ``degree`` ranks, of which this one's are computed."""

    degree: int
    vocabulary: int

    def forward(self, hidden: Tensor) -> Tensor:
        """All logits."""
        return torch.cat([super().forward(hidden)] * self.degree, dim=-1)[..., : self.vocabulary]


def is_tied(model: nn.Module) -> bool:
    """Whether the head multiplies by the embedding's weight; only models of Transformers say which these are."""
    try:
        embedding, head = (getattr(model, f"get_{which}_embeddings")() for which in ("input", "output"))
    except (AttributeError, NotImplementedError):
        return False
    return embedding is not None and head is not None and embedding.weight is head.weight


def head_words(model: nn.Module) -> int:
    """Rows of the whole head, where tensor ranks divide it; 0: they do not."""
    tied = is_tied(model)
    cuts = (module for name, module in model.named_modules() if cut_of(name, tied=tied) is Cut.GATHERED)
    head: Any = next((module for module in cuts if isinstance(module, nn.Linear)), None)
    return 0 if head is None else int(getattr(head, "vocabulary", head.out_features))


def divide(model: PreTrainedModel, degree: int, *, in_slices: bool = False) -> None:
    """Give the layers of ``model``, which has no storage, the shapes of one of ``degree`` ranks; ``in_slices``: which
    has a slice of the tokens between them.
    """
    embedding, tied = model.get_input_embeddings(), is_tied(model)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        cut = cut_of(name, tied=tied)
        if cut is Cut.ROWS:
            module.in_features //= degree
        elif cut is not None:
            module.out_features = -(-module.out_features // degree)
        if cut is not None:
            _resize(module, rows=cut is not Cut.ROWS)
            for parent in (path := name.rpartition(".")[0], path.rpartition(".")[0]):  # adapters are one level deeper
                _heads(model.get_submodule(parent), degree)
        if cut is Cut.GATHERED:
            head: Any = module
            head.__class__ = GatheredHead
            head.degree = degree
            head.vocabulary = embedding.num_embeddings
    if in_slices:
        scattered.start(model, scattered.Tokens(degree, 0, ""))


def sums(linears: Iterable[tuple[str, str]]) -> tuple[int, int, int]:
    """How often ranks sum the hidden states of a block: in forward behind each layer divided by rows, in backward
    before each divided by columns; where it runs again, without the last one, which nothing is saved of. ``linears``:
    the block of each linear layer, and its path.
    """
    cuts = Counter((block, cut_of(path, tied=True)) for block, path in linears if "lora" not in path)
    rows, columns = (
        max((number for (_, cut), number in cuts.items() if cut is kind), default=2) for kind in (Cut.ROWS, Cut.COLUMNS)
    )
    return rows, columns, rows - 1


def _resize(module: nn.Linear, *, rows: bool) -> None:
    shape = (module.out_features, module.in_features)
    module.weight = nn.Parameter(module.weight.new_empty(shape), module.weight.requires_grad)
    if module.bias is not None and rows:
        module.bias = nn.Parameter(module.bias.new_empty(shape[:1]), module.bias.requires_grad)


def _heads(parent: Any, degree: int) -> None:
    """Some attentions view their heads by a number; DeepSpeed divides it as well."""
    count = getattr(parent, "num_heads", None)
    if isinstance(count, int) and not getattr(parent, "divided", False):
        parent.num_heads, parent.divided = count // degree, True
