"""What DeepStow changes in Hugging Face's Trainer, for ``deepstow train``.

What a step is, its execution knows (``trainer/execution``). Besides, the loss of an evaluation is the mean over
*tokens*, so perplexity is right when lengths differ; our numbers are in every record before any callback sees it
(``callbacks/``); a run whose gradients are not finite ends; a checkpoint is a draft, sealed beside training, before it
gets its name (``checkpoints/``), and one that finds no space is one line, on every rank or on none, and the run goes
on; a run that is resumed at its last step takes no further one.

Which private names of Hugging Face's that takes, and why: ``tests/unit/test_private_methods.py``.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine import NonFiniteError, StowOptimizer
from deepstow.strategies.parallel.stages import Stage
from deepstow.strategies.state.commit import same_modes
from deepstow.strategies.state.sealed import Damaged
from deepstow.strategies.state.spans import WEIGHT
from deepstow.trainer.errors import ConfigError, first_line, write_line
from deepstow.trainer.execution.base import Execution, Place
from deepstow.trainer.execution.choice import execution_of
from deepstow.trainer.model import apart, loss_terms
from deepstow.trainer.model.mapped import Spilled
from deepstow.trainer.run.appended import Mounted
from deepstow.trainer.run.callbacks.nonfinite import DEEPSPEED_SAYS, NonFinite, StopNonFinite, first_not_finite
from deepstow.trainer.run.callbacks.plan_check import PlanCheck
from deepstow.trainer.run.callbacks.reports import EarlyStopping, Meter
from deepstow.trainer.run.callbacks.trackers import SkipsFailedSaves
from deepstow.trainer.run.checkpoints import checkpoint, saving, training_state
from deepstow.trainer.run.stowed_trainer import StowedTrainer
from deepstow.trainer.tasks.task import scores


class Trainer(StowedTrainer, transformers.Trainer):
    """``transformers.Trainer`` as one rank of a job.

    Args:
        meter, plan_check: also among the ``callbacks``.
        stage: of the model, which this rank has; None: it has a whole one.
        pour: gives the stowed model its values; None: it has them.
        describe: what every checkpoint says about the run of a model.
        make_optimizer: of a model, torch's class, ``decay`` and options; None: Hugging Face makes it.
        scores_alone: an evaluation needs the model's logits, and no loss of its own.
    """

    plan: Plan

    def __init__(
        self,
        *args: Any,
        meter: Meter,
        plan: Plan,
        plan_check: PlanCheck | None,
        stage: Stage | None = None,
        pour: Callable[[StowOptimizer], None] | None = None,
        describe: Callable[[Any], checkpoint.About],
        make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scores_alone: bool = False,
        **kwargs: Any,
    ) -> None:
        self.meter = meter
        self.plan_check = plan_check
        self.plan = plan
        self._stage = stage
        self._pour = pour
        self._describe = describe
        self._make_optimizer = make_optimizer
        self.scores_alone = scores_alone
        self._saving: saving.Save | None = None
        self._resumed: str | None = None
        self.between_passes = True  # where the run that is resumed goes on
        self._trained = False
        self._best_loaded: Path | None = None  # the checkpoint whose weights were taken at the end
        super().__init__(*args, **kwargs)
        self.execution.start(self)
        if not self.execution.gives_logits:
            self.preprocess_logits_for_metrics = None
        # Hugging Face deletes no checkpoints: it does so before the new one is on the disk, and at the end the newest.
        self.keep, self.args.save_total_limit = self.args.save_total_limit, None
        self.args.save_only_model = True  # ``save_model`` writes what else there is
        self.loads_best = bool(self.args.load_best_model_at_end)
        self.output_dir = Path(str(self.args.output_dir))
        self.mounted = Mounted(self.output_dir) if self.args.should_save else None
        self.newest, self.save_bytes = "", 0  # of this run's newest save: its name, and how much the next one takes
        self.spilled_bytes = 0  # of that, while the model is written
        self.stop_non_finite = StopNonFinite(self)
        self.add_callback(self.stop_non_finite)
        self.callback_handler.callbacks.insert(0, Checkpoints(self))

    @property
    def stows(self) -> bool:
        """Whether the plan has a layout, so that the memory engine trains."""
        return self.plan.layout is not None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not (self.stows or self.is_deepspeed_enabled):
            place(self.model, self.args.device)
        self.about = self._describe(self.model)  # the first moment at which it has all adapters
        self._adds_terms = loss_terms.switched_on(self.model.config) is not None
        self.accelerator.loading_s = float(self.args.ddp_timeout)

    def make_execution(self) -> Execution:
        """As the plan says."""
        return execution_of(self.plan, self.model, self._stage)

    def get_tp_size(self) -> int:
        """How many ranks are given the same rows: all of one replica.

        Hugging Face divides by it the number of tokens that it has gathered from all ranks; one if it gathers none.
        """
        if not self.args.average_tokens_across_devices:
            return 1
        return int(self.args.world_size) // self.plan.facts.run.replicas

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As Hugging Face's, or the one that this Trainer was given a function for."""
        if self.optimizer is None and self._make_optimizer is not None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = self._make_optimizer(self.model, kind, decay=self.args.weight_decay, **options)
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._pour is not None and self.stowed is not None:
            pour, self._pour = self._pour, None
            pour(self.stowed)
        self.execution.follow(optimizer, self.model)
        return optimizer

    def make_plan(self, groups: list[dict[str, Any]], moments: int) -> Plan:
        """The plan of the run."""
        return self.plan

    # --- training and evaluation -------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; the newest save is over when it returns. Raise NonFinite if gradients are not.

        Hugging Face and DeepSpeed load nothing of a checkpoint but the state of the loop: ``Checkpoints`` does.
        """
        self._resumed = str(resume_from_checkpoint) if resume_from_checkpoint else None
        try:
            output = super().train(None, *args, **kwargs)
            self.settle()
            if (line := self.execution.finish()) and self.args.process_index == 0:
                write_line(line)
            return output
        except NonFiniteError as error:
            first_step = self.state.global_step + 2 - error.steps_ago
            what = f"gradients are not finite since then, in {error.steps_ago} steps that were skipped"
            raise self.not_finite(first_step, what, error.parameter) from None
        except Exception as error:
            if DEEPSPEED_SAYS not in str(error):
                raise
            what = "gradients are not finite though the loss scale is at its minimum"
            raise self.not_finite(self.state.global_step + 1, what) from None
        finally:
            if self._saving is not None:  # after an error, when other ranks may be anywhere
                wait([self._saving.sealing])

    def not_finite(self, step: int, what: str, gradient: str | None = None) -> NonFinite:
        """The error of a run that ends at ``step``, with the ``gradient`` that the engine has named; a collective."""
        first = first_not_finite(self, gradient)
        self.settle()
        complete = checkpoint.complete(self.output_dir)
        last_checkpoint = f"{complete[-1].path} is the last checkpoint" if complete else "there is no checkpoint yet"
        return NonFinite(
            f"step {step}: {what}; not finite first: {first}. Nothing was saved since; {last_checkpoint}. Lower "
            f"training.learning_rate, or look at the data of this step"
        )

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's, but no epoch for a run that is resumed at its last step, or where it had stopped early.

        Hugging Face counts whole epochs. It would begin one more wherever the last step is not the end of an epoch,
        and look at the number of steps after the first of them.
        """
        num_epochs, *others, max_steps = super().set_initial_training_values(*args, **kwargs)
        if self._resumed is not None:
            state = TrainerState.load_from_json(str(Path(self._resumed) / TRAINER_STATE_NAME))
            early = [callback for callback in self.callback_handler.callbacks if isinstance(callback, EarlyStopping)]
            num_epochs = 0 if state.global_step >= max_steps or any(stop.over(state) for stop in early) else num_epochs
        return num_epochs, *others, max_steps

    def _init_training_state(
        self, max_steps: int, per_epoch: int, num_epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """As Hugging Face's: the pass over the data and the batch in it, from which a resumed run goes on.

        Of a stream without a length Hugging Face takes all steps for those of the first pass, and begins anew in a
        later one. How far the pass was follows from the saved epoch: ``pass + updates / max_steps``.
        """
        passes, batches = super()._init_training_state(max_steps, per_epoch, num_epochs, self._resumed, trial)
        if self._resumed is not None and not has_length(self.train_dataset) and not self.args.ignore_data_skip:
            saved = TrainerState.load_from_json(str(Path(self._resumed) / TRAINER_STATE_NAME))
            assert saved.epoch is not None
            # A run that has ended within its first pass has made all of its updates there, and goes on in it.
            passes = 0 if saved.epoch == 1 and saved.global_step == saved.max_steps else int(saved.epoch)
            batches = round((saved.epoch - passes) * saved.max_steps) * self.args.gradient_accumulation_steps
        self.between_passes = batches == 0
        self.state = StateInDraft(**vars(self.state))
        return passes, batches

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As Hugging Face's, which skips the batches that are trained only if it was given a checkpoint."""
        if self._resumed is not None:
            kwargs["resume_from_checkpoint"] = os.devnull  # in which there are no states of generators
        super()._run_epoch(*args, **kwargs)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any, **more: Any) -> torch.Tensor:
        self._trained = True
        self.meter.count(sum(ids.numel() for name, ids in inputs.items() if name.endswith("input_ids")))
        self.last_inputs = inputs
        self.last_loss = super().training_step(model, inputs, *rest, **more)
        return self.last_loss

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As Hugging Face's; what a model adds to its loss counts as the mean over micro-batches and ranks.

        Over a part of the tokens as small as the micro-batch's share of the update, the whole loss is a mean; the share
        of that is added up.

        In an evaluation the losses of tokens are taken from the logits, in less memory than the model's own loss needs,
        which is then not computed.
        """
        if return_outputs and self.scores_alone:
            outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
            return scores(outputs).new_zeros(()), outputs
        parts = 1
        if num_items_in_batch is not None and model.training and self.model_accepts_loss_kwargs and self._adds_terms:
            parts = self.current_gradient_accumulation_steps
            if self.args.average_tokens_across_devices:
                parts *= self.accelerator.num_processes // self.get_tp_size()
            num_items_in_batch = num_items_in_batch / parts
        compute = partial(super().compute_loss, model)
        with self.plan_check.counting(model, self.state.global_step) if self.plan_check else nullcontext():
            result = self.execution.loss(compute, inputs, outputs=return_outputs, num_items=num_items_in_batch)
        if parts == 1:
            return result
        return (result[0] / parts, result[1]) if return_outputs else result / parts

    def prediction_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's, by the execution."""
        predict = super().prediction_step

        def one(batch: Any) -> Any:
            return predict(model, batch, *args, **kwargs)

        return self.execution.predict(one, model, inputs)

    def logits_of(self, row: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logits that forward gives for a row of tokens, without gradients, on every rank; a collective."""
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = self.execution.logits(model, {name: ids.to(self.args.device) for name, ids in row.items()})
        model.train(was_training)
        return logits.float().cpu()

    def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        """As Hugging Face's, with our numbers; no record of a training that did not take place."""
        self.stop_non_finite.settle()
        if "train_loss" in logs:  # the last record, after which Hugging Face would load the best weights
            self.args.load_best_model_at_end = False
        if self._trained or "train_loss" not in logs:
            self.meter.add_to(logs, self.state)
            if "train_loss" in logs and self.args.world_size > 1:  # its steps since the last record are of one rank
                rank_loss = torch.tensor([logs["train_loss"]], dtype=torch.float64, device=self.args.device)
                logs["train_loss"] = self.accelerator.gather(rank_loss).mean().item()
            if "loss" in logs:
                logs.update(self.execution.figures())
            super().log(logs, *rest, **more)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's, but it draws no random number of training's: its loader would."""
        self.stop_non_finite.settle()
        with torch.random.fork_rng(devices=[]), self.execution.evaluating():
            return super().evaluate(*args, **kwargs)

    def loss_as_trained(self) -> float | None:
        """Of an evaluation that computes as training does; None: evaluations do."""
        within = self.execution.as_trained(self.model)
        if within is None:
            return None
        with within, torch.random.fork_rng(devices=[]):
            rows: Any = self.get_eval_dataloader()
            return float(self.evaluation_loop(rows, "Evaluation", metric_key_prefix="x").metrics["x_loss"])

    # --- loading a checkpoint ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Take over weights, optimizer and schedule of the checkpoint that is resumed. May raise Misfit."""
        if self._resumed is not None:
            training_state.load(self, Path(self._resumed))

    def load_generators(self) -> None:
        """Take over their states, too."""
        if self._resumed is not None and (line := training_state.load_random_state(self, Path(self._resumed))):
            write_line(line)

    def load_best(self) -> None:
        """Weights of the best evaluation that has a checkpoint, under every strategy; nothing if the last weights are
        the best and have none. Raise ConfigError if that checkpoint is damaged.
        """
        self.settle()  # then the newest is there, or known not to be
        last_is_best = self.state.best_global_step == self.state.global_step
        if self.state.best_model_checkpoint is not None:
            best = Path(str(self.state.best_model_checkpoint))
            if last_is_best and best.name != f"checkpoint-{self.state.global_step}":
                return
            try:
                checkpoint.verified(best)
            except Damaged as damaged:
                key = "training.load_best_model_at_end = true"
                raise ConfigError(f"{key}: {best} cannot be loaded: damaged: {damaged}") from None
            training_state.load_weights(self, best)
            self._best_loaded = best
            self.execution.resumed()

    def origin(self) -> tuple[Path | None, Path | None]:
        """Where the weights are saved as they are now: the checkpoint of the last step, which this run has saved or
        resumed, and the one of the best step, if its weights were taken; None: there is none. Settled before.
        """
        saved = self.output_dir / self.newest if self.newest == f"checkpoint-{self.state.global_step}" else None
        resumed = Path(self._resumed) if self._resumed and not self._trained else None
        return saved or resumed, self._best_loaded

    # --- saving one --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Hugging Face's, without the pickle of the arguments; ``config.yaml`` has them. For its loop: a checkpoint.

        Where ranks have parts of the weights they are gathered first, which is a collective in every release. Weights
        that are not in memory are made one by one, in a file; adapters need none of their base.
        """
        if _internal_call:
            self.save_checkpoint()
            return
        folder = Path(output_dir or self.output_dir)
        spilled = Spilled(folder)
        model = self.accelerator.unwrap_model(self.whole)
        base = not hasattr(model, "peft_config")
        state = self.execution.gathered(
            self.accelerator.unwrap_model(self.model_wrapped),
            keep=bool(self.args.should_save),
            place=spilled,
            base=base,
        )
        if state is None:
            super().save_model(str(folder))
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            return
        spilled.settle()
        if self.args.should_save:
            pieces = Spilled(folder)
            apart.save(model, folder, state, pieces)
            spilled.refuse_damaged()
            self.spilled_bytes = spilled.num_bytes + pieces.num_bytes
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def whole_state(self, place: Place | None = None) -> dict[str, torch.Tensor]:
        """The state dict of the whole model on the first rank, on others nothing or parts of it; a collective.
        ``place``: puts a tensor of which ranks have parts where it stays; by default that is memory.
        """
        return dict(self.accelerator.get_state_dict(self.model_wrapped, place=place) or {})

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: TRL writes one with every checkpoint; the export has one."""

    def save_checkpoint(self) -> None:
        """Write a draft on all ranks, and have it committed beside training; a collective."""
        self.stop_non_finite.settle()
        self.settle()
        folder, writes = self.output_dir / f"checkpoint-{self.state.global_step}", bool(self.args.should_save)
        former_best = self.state.best_model_checkpoint
        exportable: Any = [
            item for item in [*self.callback_handler.callbacks, self.control] if isinstance(item, ExportableState)
        ]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks

        def write(draft: Path) -> None:
            with self.execution.evaluating():
                self.save_model(str(draft))
                training_state.save(self, draft)
            self.execution.save(draft, self.args.process_index)
            training_state.save_random_state(self, draft)

        try:
            with saving.draft(self.output_dir, self.save_bytes, writes=writes, mounted=self.mounted) as drafts:
                draft = drafts / folder.name
                saving.together(lambda: write(draft))
                self.state.best_model_checkpoint = self._best(former_best)
                seal = saving.together(lambda: self._commit(draft, folder) if writes else list[str])
        except OSError as error:
            self._not_saved(folder, error, former_best)
            return
        # Not inside the block, which deletes the draft if another rank fails.
        self._saving = saving.Save(folder, former_best, saving.beside(seal))
        if any(map(_reads_saves, self.callback_handler.callbacks)):
            self.settle()

    def settle(self) -> None:
        """Wait until the newest save is over on all ranks, if that was not done yet; a collective.

        If it could not be sealed that is one line, and the run goes on; older checkpoints are as they were.
        """
        save = self._saving
        if save is None:
            return
        try:
            for line in saving.together(save.sealing.result):
                write_line(line)
            self.newest = save.folder.name
            self.save_bytes = saving.size_of(save.folder) + self.spilled_bytes
        except OSError as error:
            self._not_saved(save.folder, error, save.best)
        self._saving = None  # not before: who interrupts this waits for it in ``train``

    def _not_saved(self, folder: Path, error: OSError, best: str | None) -> None:
        self.state.best_model_checkpoint = best
        if self.args.process_index == 0:
            write_line(f"{folder} was not saved: {error}; older ones are as they were; the next save tries again")

    def _best(self, former: str | None) -> str | None:
        """The best checkpoint, by the name that it will have."""
        best, folder = self.state.best_global_step, self.output_dir / f"checkpoint-{self.state.best_global_step}"
        return str(folder) if best == self.state.global_step or (best and folder.is_dir()) else former

    def _commit(self, written: Path, folder: Path) -> Callable[[], list[str]]:
        """What seals the draft; it uses nothing of the model, which trains meanwhile. Raise OSError if what was written
        cannot be read.
        """
        try:
            training_state.opened(self, written)
        except ValueError as error:
            raise OSError(errno.EIO, f"it cannot be read back: {first_line(error)}") from error
        TrainerState.save_to_json(self.state, str(written / TRAINER_STATE_NAME))
        named = (name for name, _ in self.accelerator.unwrap_model(self.whole).named_buffers())
        buffers = {key for name in named for key in (name, f"{name}.{WEIGHT}")}  # in the model's files, and as a span
        loss_is_finite = not hasattr(self, "last_loss") or math.isfinite(float(self.last_loss))
        step = self.state.global_step
        keep = self.keep
        best = self.state.best_model_checkpoint
        same_modes(written)

        def manifest() -> checkpoint.Manifest:
            finite = loss_is_finite and saving.all_finite(written, buffers)
            return checkpoint.Manifest(step=step, finite=finite, run=self.about)

        def seal() -> list[str]:
            saving.commit(written, folder, manifest)
            try:
                return (
                    []
                    if keep is None
                    else checkpoint.delete_old(folder.parent, keep, step, Path(best) if best else None)
                )
            except OSError as error:  # the new one is saved nevertheless
                return [f"{folder.parent}: older checkpoints could not be deleted: {error}"]

        return seal


class StateInDraft(TrainerState):
    """Hugging Face's. Its loop has it write itself after ``save_model``, where a full disk would end the run; it is in
    the draft already.
    """

    def save_to_json(self, json_path: str) -> None:
        """Nothing."""


class Checkpoints(TrainerCallback):
    """The first callback: what Hugging Face would load of a checkpoint is loaded here, exactly."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loads_generators = False  # they belong before a pass draws its order, or after its skipped batches

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.load()
        self._loads_generators = True

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.between_passes:
            self.on_step_begin()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._loads_generators:
            self._loads_generators = False
            self._trainer.load_generators()

    on_epoch_end = on_step_begin  # of a pass of which nothing was left

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        args.load_best_model_at_end = self._trainer.loads_best
        if args.load_best_model_at_end:
            self._trainer.load_best()


def place(model: Any, device: torch.device) -> None:
    """Move ``model`` to ``device``.

    On devices that register with torch (PrivateUse1) that makes two parameters of a tied one; RuntimeError if the model
    does not tie them again.
    """
    tied = len(list(model.parameters()))
    model.to(device)
    if len(list(model.parameters())) != tied and hasattr(model, "tie_weights"):
        model.tie_weights()
    if len(list(model.parameters())) != tied:
        raise RuntimeError(f"moving the model to {device} separates weights that are tied: move it there beforehand")


def _reads_saves(callback: TrainerCallback) -> bool:
    """Whether a callback that is not ours may look for the checkpoint when it hears of a save; on all ranks alike."""
    kind = type(callback)
    if isinstance(callback, SkipsFailedSaves):
        return callback.logs_checkpoints
    if kind.on_save is TrainerCallback.on_save or kind.on_save.__module__.startswith("deepstow.trainer."):
        return False
    return kind.__name__ != "TrackioCallback"
