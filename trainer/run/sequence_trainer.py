"""The part of the trainer that gives the model a slice of every row, and the loss its weight.

Ranks of a row are given the same batch. Each computes the sum of the losses of its slice over the number of tokens that
the whole update trains, so losses and gradients have only to be added up. What averages over all ranks afterwards
(DistributedDataParallel, DeepSpeed, the memory engine, the logged loss) is made up for here, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepstow.strategies.parallel import ulysses
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.run.stowed_trainer import StowedTrainer
from deepstow.trainer.tasks.task import losses_of

if TYPE_CHECKING:
    import transformers

    class _Trainer(StowedTrainer, transformers.Trainer): ...

else:
    _Trainer = StowedTrainer


class SequenceTrainer(_Trainer):
    """The mixin of ``Trainer`` for a rank that has a slice of every row. Without one it changes nothing."""

    attention: ulysses.Ulysses | None = None
    args: Any

    def start_sequence(self) -> None:
        """Take the slices that the model's attention is over."""
        self.attention = ulysses.of(self.model)
        self.preprocess_logits_for_metrics: Any = None  # losses of tokens are summed here

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As Hugging Face's, of this rank's slice; the mean over all ranks is the loss."""
        if self.attention is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        among_all = num_items_in_batch is not None and self.args.average_tokens_across_devices
        if num_items_in_batch is None:
            num_items_in_batch = inputs["labels"][:, 1:].ne(MASKED).sum()
        # It is an input like the others, so that releases of Transformers do not scale the loss, each in its way.
        given = {**self.attention.slice_of(inputs), "num_items_in_batch": num_items_in_batch}
        found = super().compute_loss(model, given, return_outputs)
        loss, *rest = found if return_outputs else (found,)
        loss = loss * (self.args.world_size if among_all else self.attention.degree)
        return (loss, *rest) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; ranks of a row get the losses of its tokens instead of logits."""
        if self.attention is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        inputs = self._prepare_inputs(inputs)
        given = self.attention.slice_of(inputs)
        targets = given.pop("shift_labels")
        del given["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            found = self.attention.sum(losses_of(model(**given).logits, targets))
        return found[:, 0].sum() / found[:, 1].sum().clamp_min(1), found, inputs["labels"]
