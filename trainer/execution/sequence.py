"""This rank has a slice of every row, and the loss its weight: around any other way.

Ranks of a row are given the same batch. Each computes the sum of the losses of its slice over the number of tokens that
the whole update trains, so losses and gradients have only to be added up. What averages over all ranks afterwards
(DistributedDataParallel, DeepSpeed, the memory engine, the logged loss) is made up for here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device

from deepstow.strategies.parallel import ulysses
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.execution.base import Around, Batch
from deepstow.trainer.tasks.task import losses_of


class Sliced(Around):
    """The slices are those that the model's attention is over."""

    gives_logits = False  # losses of tokens are summed here

    def start(self, trainer: Any) -> None:
        self.inner.start(trainer)
        attention = ulysses.of(trainer.model)
        assert attention is not None
        self._attention = attention
        self._trainer = trainer

    def loss(self, compute: Callable[..., Any], inputs: Batch, *, outputs: bool, num_items: Any) -> Any:
        """Of this rank's slice; the mean over all ranks is the loss."""
        args = self._trainer.args
        among_all = num_items is not None and args.average_tokens_across_devices
        if num_items is None:
            num_items = inputs["labels"][:, 1:].ne(MASKED).sum()
        # It is an input like the others, so that releases of Transformers do not scale the loss, each in its way.
        sliced = {**self._attention.slice_of(inputs), "num_items_in_batch": num_items}
        result = self.inner.loss(compute, sliced, outputs=outputs, num_items=None)
        loss, *other_outputs = result if outputs else (result,)
        loss = loss * (args.world_size if among_all else self._attention.degree)
        return (loss, *other_outputs) if outputs else loss

    def predict(self, predict: Callable[[Batch], Any], model: Any, inputs: Batch) -> Any:
        """Ranks of a row get the losses of its tokens instead of logits."""
        inputs = send_to_device(inputs, self._trainer.args.device)
        sliced = self._attention.slice_of(inputs)
        targets = sliced.pop("shift_labels")
        del sliced["labels"]
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            losses = self._attention.sum(losses_of(model(**sliced).logits, targets))
        return losses[:, 0].sum() / losses[:, 1].sum().clamp_min(1), losses, inputs["labels"]
