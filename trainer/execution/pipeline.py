"""This rank has a stage of the model: around plain training or around the memory engine.

Hugging Face's loop runs one micro-batch after the other. A pipeline needs all of a step together, and only the last
stage has logits and losses. So the schedule runs all of them when the loop asks for the first, and the loop is given
their losses one by one: sums, logs, callbacks and the order of the data are as without a pipeline.

What a part draws in training, as for dropout, comes from a sequence of its own that follows from seed, rank, step and
forward; ranks that divide the layers of a stage draw the same. The generators themselves stay as they are, so that
samplers and checkpoints of stages agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.core.plan import Kind, Plan
from deepstow.strategies.parallel import pipeline_state, pipelining
from deepstow.strategies.parallel.pipeline_gradients import StageGradients
from deepstow.strategies.parallel.pipeline_zero import StateShares
from deepstow.strategies.parallel.stages import Stage
from deepstow.strategies.planner.cuts import Schedule
from deepstow.trainer.execution.base import Around, Batch, Execution, Place
from deepstow.trainer.tasks.task import token_losses


class Pipeline(Around):
    """``stage``: what this rank has, as ``plan`` says."""

    wraps = False  # ranks hold different weights
    gives_logits = False
    forward_is_collective = True
    pipeline: pipelining.Pipeline

    def __init__(self, inner: Execution, stage: Stage, plan: Plan) -> None:
        super().__init__(inner)
        self.stage = stage
        self._plan = plan
        self._shares: StateShares | None = None  # where copies of the stage divide the optimizer's state
        self._batches: Sequence[Mapping[str, Any]] = ()
        self._losses: list[Tensor] = []
        self._drawn = 0  # sequences of random numbers in this step

    def start(self, trainer: Any) -> None:
        """Make groups and schedules; a collective."""
        self.inner.start(trainer)
        self._trainer = trainer
        group, self._copies = pipelining.groups(self.grid)
        cut = self._plan.facts.cut
        assert cut is not None
        schedule = Schedule(cut.schedule)
        self.pipeline = pipelining.Pipeline(self.stage, schedule, group, trainer.args.device, self._around_part)
        self.gradients = StageGradients(self.pipeline, self._copies)

    @property
    def position(self) -> int:  # type: ignore[override]
        return self.pipeline.position

    def among_ranks(self, model: Any) -> dict[str, Any]:
        """The memory engine of a part averages over the copies of the model, and clips by the norm of all parts."""
        return {"process_group": self._copies, "total_norm": self.gradients.total_norm}

    def follow(self, optimizer: Any, model: Any) -> None:
        """The memory engine is told of every backward, torch's optimizer of its share."""
        self.inner.follow(optimizer, model)
        if self.stowed is not None:
            self.pipeline.before_backward = self.stowed.engine.begin_backward
        elif self._shares is None and self._plan.divides(Kind.MOMENT):
            self._shares = StateShares(optimizer, self._copies)

    def whole(self, model: Any) -> Any:
        """The model with all its names and shapes, without values."""
        return self.stage.whole

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, batches: Sequence[Batch]) -> None:
        self._batches = list(batches)
        self._losses = []

    def training_step(self, step: Callable[[Batch], Tensor], batch: Batch, num_items: Any) -> Tensor:
        """The first micro-batch of a step runs all of them."""
        if not self._losses:
            trainer = self._trainer
            trainer.model.train()
            self._drawn = 0
            batches = [send_to_device(dict(micro_batch), trainer.args.device) for micro_batch in self._batches]
            self._losses = list(self.pipeline.step(batches, partial(self._loss_of, num_items)).unbind())
            if self.stowed is None:
                self.gradients.complete()
        return self._losses.pop(0)

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, accelerator: Any, clip: Any) -> Any:
        if self.stowed is not None:
            return self.inner.clip(parameters, max_norm, norm_type, accelerator, clip)
        return self.gradients.clip(max_norm)

    def _loss_of(self, num_items: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of a micro-batch as Hugging Face's training step takes it."""
        trainer = self._trainer
        with trainer.compute_loss_context_manager(), self._own_numbers():
            loss: Any = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=num_items)
        is_mean = num_items is None or not trainer.model_accepts_loss_kwargs
        scaled: Tensor = loss / len(self._batches) if is_mean and trainer.compute_loss_func is None else loss
        return scaled

    @contextmanager
    def _around_part(self) -> Iterator[None]:
        if self.stowed is not None:
            self.stowed.begin_forward()
        with self._trainer.accelerator.autocast(), self._own_numbers():
            yield

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Inside, training draws from a sequence of this rank, this step and this forward."""
        trainer = self._trainer
        if not trainer.model.training:
            yield
            return
        self._drawn += 1
        args, step = trainer.args, trainer.state.global_step
        with own_numbers(self.grid, args.process_index, args.seed, step, self._drawn, args.device):
            yield

    def forward_again(self, trainer: Any) -> None:
        self.pipeline.forward(trainer.last_inputs, lambda each: self._loss_of(None, each).reshape(1), (1,))

    def backward_again(self, trainer: Any) -> None:
        self.pipeline.step([trainer.last_inputs], partial(self._loss_of, None))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def predict(self, predict: Callable[[Batch], Any], model: Any, inputs: Batch) -> Any:
        """Every stage gets the losses of tokens instead of logits."""
        trainer = self._trainer
        inputs = send_to_device(inputs, trainer.args.device)
        labels = inputs["labels"]
        unlabelled = {key: value for key, value in inputs.items() if key != "labels"}
        with torch.no_grad(), trainer.compute_loss_context_manager():
            losses = self.pipeline.forward(
                unlabelled, lambda each: token_losses(trainer.model(**each).logits, labels), (len(labels), 2)
            )
        return losses[:, 0].sum() / losses[:, 1].sum().clamp_min(1), losses, labels

    def logits(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        whole_model: Any = self.stage.whole
        rows = whole_model.get_output_embeddings().weight.shape[0]
        return self.pipeline.forward(
            dict(inputs), lambda each: model(**each).logits, (*inputs["input_ids"].shape, rows)
        )

    # --- weights and state --------------------------------------------------------------------------------------------

    def gathered(
        self, model: Any, *, keep: bool, place: Place | None = None, base: bool = True
    ) -> dict[str, Tensor] | None:
        cell = self.grid.cell(self._trainer.args.process_index)
        return dict(pipeline_state.gathered(self.pipeline, place)) if cell.replica == 0 else {}

    def holder(self, trainer: Any) -> Any:
        writes = self.grid.cell(trainer.args.process_index).replica == 0
        if self.stowed is not None:
            return pipeline_state.EnginesStage(self.stowed, self.pipeline, writes=writes)
        inner = trainer.inner_optimizer
        return pipeline_state.pipeline_state(inner, self.pipeline, self.gradients, self._shares, writes=writes)


@contextmanager
def own_numbers(grid: Grid, rank: int, seed: int, step: int, drawn: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of a rank, a step and a forward; outside nothing is drawn. Of ranks that divide
    a stage's layers it is the first one's, see [Note: dropout] in ``strategies/parallel/tensor_shards.py``.
    """
    first = grid.rank(grid.cell(rank)._replace(tensor=0))
    place = (seed, first, step, drawn)
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7], "little"))
        yield
