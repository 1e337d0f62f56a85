"""The part of the trainer that runs a pipeline: a step of micro-batches at once, evaluation, and the whole model.

Hugging Face's loop runs one micro-batch after the other. A pipeline needs all of a step together, and only the last
stage has logits and losses. So the schedule runs all of them when the loop asks for the first, and the loop is given
their losses one by one: sums, logs, callbacks and the order of the data are as without a pipeline.

What a part draws in training, as for dropout, comes from a sequence of its own that follows from seed, rank, step and
forward; ranks that divide the layers of a stage draw the same. The generators themselves stay as they are, so that
samplers and checkpoints of stages agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepstow.strategies.core.plan import Kind
from deepstow.strategies.parallel import pipeline_state, pipelining, tensor_engine
from deepstow.strategies.parallel.pipeline_gradients import StageGradients
from deepstow.strategies.parallel.pipeline_zero import StateShares
from deepstow.strategies.planner.cuts import Schedule
from deepstow.trainer.run.stowed_trainer import StowedTrainer
from deepstow.trainer.tasks.task import losses_of, scores

if TYPE_CHECKING:
    import transformers

    from deepstow.strategies.parallel.stages import Stage

    class _Trainer(StowedTrainer, transformers.Trainer): ...

else:
    _Trainer = StowedTrainer


class PipelineTrainer(_Trainer):
    """The mixin of ``Trainer`` for a model of which this rank has a stage. Without one it changes nothing."""

    stage: Stage | None = None
    pipeline: pipelining.Pipeline | None = None
    shares: StateShares | None = None  # where copies of the stage divide the optimizer's state
    args: Any
    accelerator: Any
    model: Any
    plan: Any
    last_inputs: Any
    last_loss: torch.Tensor

    def start_pipeline(self, stage: Stage) -> None:
        """Make groups and schedules for ``stage``; a collective."""
        grid = self.plan.facts.run.grid
        group, self._copies = pipelining.groups(grid)
        self.stage = stage
        schedule = Schedule(self.plan.facts.cut.schedule)
        self.pipeline = pipelining.Pipeline(stage, schedule, group, self.args.device, self._around_part)
        self.gradients = StageGradients(self.pipeline, self._copies)
        self.accelerator.gradients = self.gradients
        self.preprocess_logits_for_metrics: Any = None  # the last stage sends losses of tokens, and no logits
        self._batches: list[Mapping[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._drawn = 0  # sequences of random numbers in this step

    def among_ranks(self) -> dict[str, Any]:
        """The memory engine of a part averages over the copies of the model, and clips by the norm of all parts."""
        grid = self.plan.facts.run.grid
        if self.pipeline is None:
            return tensor_engine.among_ranks(self.model, grid) if grid.tensor > 1 else super().among_ranks()
        return {"process_group": self._copies, "total_norm": self.gradients.total_norm}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As without a pipeline; the memory engine is told of every backward, torch's optimizer of its share."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.pipeline is not None and self.stowed is not None:
            self.pipeline.before_backward = self.stowed.engine.begin_backward
        elif self.pipeline is not None and self.shares is None and self.plan.divides(Kind.MOMENT):
            self.shares = StateShares(optimizer, self._copies)
        return optimizer

    @property
    def whole(self) -> Any:
        """The model with all its names and shapes; of a stage without values."""
        return self.model if self.stage is None else self.stage.whole

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; the micro-batches are kept for the schedule."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if self.pipeline is not None:
            self._batches, self._losses = list(batches), []
        return batches, count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """As Hugging Face's. With a pipeline the first micro-batch of a step runs all of them."""
        if self.pipeline is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if not self._losses:
            model.train()
            self._drawn = 0
            batches = [self._prepare_inputs(dict(batch)) for batch in self._batches]
            self._losses = list(self.pipeline.step(batches, partial(self._loss_of, num_items_in_batch)).unbind())
            if self.stowed is None:
                self.gradients.complete()
        return self._losses.pop(0)

    def _loss_of(self, num_items: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The loss of a micro-batch as Hugging Face's training step takes it."""
        with self.compute_loss_context_manager(), self._own_numbers():
            loss: Any = self.compute_loss(self.model, dict(inputs), num_items_in_batch=num_items)
        is_mean = num_items is None or not self.model_accepts_loss_kwargs
        found: torch.Tensor = loss / len(self._batches) if is_mean and self.compute_loss_func is None else loss
        return found

    @contextmanager
    def _around_part(self) -> Iterator[None]:
        if self.stowed is not None:
            self.stowed.begin_forward()
        with self.accelerator.autocast(), self._own_numbers():
            yield

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Inside, training draws from a sequence of this rank, this step and this forward; outside nothing is drawn.
        Of ranks that divide a stage's layers it is the first one's, see [Note: dropout] in ``tensor_shards.py``.
        """
        if not self.model.training:
            yield
            return
        self._drawn += 1
        grid = self.plan.facts.run.grid
        first = grid.rank(grid.cell(self.args.process_index)._replace(tensor=0))
        place = (self.args.seed, first, self.state.global_step, self._drawn)
        kind = self.args.device.type
        with torch.random.fork_rng([] if kind == "cpu" else [self.args.device], device_type=kind):
            torch.manual_seed(int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7], "little"))
            yield

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; of a pipeline every stage gets the losses of tokens instead of logits."""
        if self.pipeline is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        rest = {key: value for key, value in inputs.items() if key != "labels"}
        with torch.no_grad(), self.compute_loss_context_manager():
            found = self.pipeline.forward(
                rest, lambda each: token_losses(self.model(**each).logits, labels), (len(labels), 2)
            )
        return found[:, 0].sum() / found[:, 1].sum().clamp_min(1), found, labels

    def logits_of(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logits that forward gives for a row of tokens, without gradients, on every rank; a collective."""
        model, inputs = self.model_wrapped, {name: ids.to(self.args.device) for name, ids in given.items()}
        was_training = model.training
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            if self.pipeline is None:
                logits = scores(model(**inputs))
            else:
                rows = self.whole.get_output_embeddings().weight.shape[0]
                logits = self.pipeline.forward(
                    inputs, lambda each: model(**each).logits, (*given["input_ids"].shape, rows)
                )
        model.train(was_training)
        found: torch.Tensor = logits.float().cpu()
        return found

    def forward_again(self) -> None:
        """Forward of the last micro-batch, on all stages; a collective."""
        if self.pipeline is None:
            self.compute_loss(self.model_wrapped, self.last_inputs)
        else:
            self.pipeline.forward(self.last_inputs, lambda each: self._loss_of(None, each).reshape(1), (1,))

    def backward_again(self) -> None:
        """Forward and backward of the last micro-batch, on all stages; a collective."""
        if self.pipeline is None:
            model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
            loss: Any = self.compute_loss(model, self.last_inputs)
            loss.backward()
        else:
            self.pipeline.step([self.last_inputs], partial(self._loss_of, None))

    def whole_state(self, place: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The state dict of the whole model on the first rank, on others nothing or parts of it; a collective.
        ``place``: puts a tensor of which ranks have parts where it stays; by default that is memory.
        """
        if self.pipeline is None:
            return dict(self.accelerator.get_state_dict(self.model_wrapped, place=place) or {})
        cell = self.plan.facts.run.grid.cell(self.args.process_index)
        return pipeline_state.gathered(self.pipeline, place) if cell.replica == 0 else {}


def token_losses(logits: torch.Tensor | tuple[Any, ...], labels: torch.Tensor) -> torch.Tensor:
    """``losses_of`` the next tokens. Other outputs may come with the logits, as a router's loss does, before them."""
    found = logits if isinstance(logits, tuple) else (logits,)
    scores = next(each for each in found if isinstance(each, torch.Tensor) and each.dim() == 3)
    return losses_of(scores[:, :-1], labels[:, 1:])
