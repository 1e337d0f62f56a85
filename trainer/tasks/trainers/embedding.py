"""The Trainer of task ``embedding``: Transformers', with the loss and the pooling of sentence-transformers.

In a file of its own, since a plan whose model was counted before loads neither torch nor Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import transformers

if TYPE_CHECKING:
    from torch import Tensor


class EmbeddingTrainer(transformers.Trainer):
    """Transformers' Trainer with sentence-transformers' loss."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, *rest: Any, **more: Any
    ) -> Any:
        loss = loss_of(model, inputs)
        return (loss, {}) if return_outputs else loss


def loss_of(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of a micro-batch.

    Args:
        inputs: ``input_ids`` [C * B, S] of C columns one after the other, ``attention_mask`` where there is padding,
            and ``labels`` [B], which says how many rows there are.
    """
    features = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    tokens = model(**features)[0]
    ranking, mean = parts(tokens.shape[-1])
    vectors = mean({"token_embeddings": tokens, **features})["sentence_embedding"]
    loss: Tensor = ranking.compute_loss_from_embeddings(list(vectors.split(len(inputs["labels"]))), None)
    return loss


@cache
def parts(width: int) -> tuple[Any, Any]:
    """Loss and pooling of sentence-transformers."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling

    return MultipleNegativesRankingLoss(cast(Any, None)), Pooling(width, "mean")
