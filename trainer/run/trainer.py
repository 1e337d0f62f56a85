"""What DeepStow changes in Hugging Face's Trainer.

* with a memory engine it is a stowed trainer (``trainer/run/stowed_trainer.py``), with the plan of the config;
* evaluation loss is the mean over *tokens*, not over batches, so perplexity is right when lengths differ;
* our numbers are in every log record before any callback sees it (``trainer/run/callbacks.py``);
* a run whose gradients are not finite ends (``trainer/run/nonfinite.py``);
* a checkpoint is written as a draft, sealed beside training, and only then gets its name (``trainer/run/saving.py``);
* what is in a checkpoint, and how it is read, is said in ``trainer/run/training_state.py``;
* of a pipeline it trains one stage (``trainer/run/pipeline_trainer.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME

from strategies.core.commit import same_modes
from strategies.engine import NonFiniteError
from strategies.state.spans import WEIGHT
from trainer.errors import ConfigError
from trainer.run import saving, training_state
from trainer.run.callbacks import Meter, write_line
from trainer.run.checkpoint import prune, refuse_damaged
from trainer.run.nonfinite import DEEPSPEED_SAYS, StopNonFinite, described
from trainer.run.pipeline_trainer import PipelineTrainer, token_losses
from trainer.run.stowed_trainer import StowedTrainer

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

    from strategies.core.plan import Plan
    from trainer.run.manifest import About
    from trainer.run.plan_check import PlanCheck


class Trainer(PipelineTrainer, StowedTrainer, transformers.Trainer):
    """``transformers.Trainer`` with our accelerator, token-weighted evaluation and log records.

    Args:
        meter: counts tokens and time; fills each record.
        plan: of the run; with a layout the memory engine trains.
        plan_check: compares the plan with the run; also one of ``callbacks``.
        about: what every checkpoint says about the run.
    """

    plan: Plan
    last_inputs: dict[str, Any]
    last_loss: torch.Tensor

    def __init__(
        self,
        *args: Any,
        meter: Meter,
        plan: Plan,
        plan_check: PlanCheck | None,
        about: About,
        **kwargs: Any,
    ) -> None:
        self.meter, self.plan_check, self.plan, self.about = meter, plan_check, plan, about
        self._draft: Path | None = None
        self._saving: saving.Save | None = None
        kwargs |= {"compute_metrics": _mean_over_tokens, "preprocess_logits_for_metrics": token_losses}
        super().__init__(*args, **kwargs)
        # Hugging Face deletes no checkpoints: it does so before the new one is on the disk, and at the end the newest.
        self.keep, self.args.save_total_limit = self.args.save_total_limit, None
        self.add_callback(StopNonFinite(self))

    @property
    def stows(self) -> bool:
        """Whether the plan has a layout, so that the memory engine trains."""
        return self.plan.layout is not None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.grid = self.plan.facts.run.grid

    def get_tp_size(self) -> int:
        """How many ranks are given the same rows: all that hold one copy of the model together.

        Hugging Face divides by it the number of tokens that it has gathered from all ranks; one if it gathers none.
        """
        if not self.args.average_tokens_across_devices:
            return 1
        return int(self.args.world_size) // self.plan.facts.run.replicas

    def make_plan(self, groups: list[dict[str, Any]], moments: int) -> Plan:
        """The plan of the run."""
        return self.plan

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; the newest save is over when it returns.

        Raises:
            NonFinite: gradients are not finite.
            NotSaved: the newest checkpoint could not be sealed.
        """
        try:
            return super().train(*args, **kwargs)
        except NonFiniteError as error:
            first_step = self.state.global_step + 2 - error.steps_ago
            what = f"gradients are not finite since then, in {error.steps_ago} steps that were skipped"
            raise described(self, first_step, what, error.parameter) from None
        except Exception as error:
            if DEEPSPEED_SAYS not in str(error):
                raise
            what = "gradients are not finite though the loss scale is at its minimum"
            raise described(self, self.state.global_step + 1, what) from None
        finally:
            if self._saving is not None:  # after an error, when other ranks may be anywhere
                self._saving.wait()

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any, **more: Any) -> torch.Tensor:
        self.meter.count(inputs["input_ids"].numel())
        self.last_inputs = inputs
        self.last_loss = super().training_step(model, inputs, *rest, **more)
        return self.last_loss

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        with self.plan_check.counting(model, self.state.global_step) if self.plan_check else nullcontext():
            return super().compute_loss(model, inputs, *rest, **more)

    def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        self.meter.add_to(logs, self.state)
        super().log(logs, *rest, **more)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's, but it draws no random number of training's: its loader would."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """As Hugging Face's, but the loss is the mean over trained tokens."""
        kwargs["metric_key_prefix"] = metric_key_prefix
        output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        metrics = output.metrics or {}
        if f"{metric_key_prefix}_token_loss" in metrics:
            metrics[f"{metric_key_prefix}_loss"] = metrics.pop(f"{metric_key_prefix}_token_loss")
        return output

    # --- what a checkpoint holds, and how it is read (training_state.py) ---------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As Hugging Face's, but DeepSpeed does not load its own checkpoint; then ours is loaded."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Nothing: weights are loaded with the optimizer, exactly, once both are where they stay."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's, which looks for the best checkpoint: by then the newest is there, or known not to be."""
        self.settle()
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Weights of the best evaluation, under every strategy.

        Raises:
            ConfigError: that checkpoint is damaged.
        """
        best = Path(str(self.state.best_model_checkpoint))
        refuse_damaged(best, "training.load_best_model_at_end = true")
        with _as_config_error():
            training_state.load_weights(self, best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Hugging Face's. Where ranks have parts of the weights, all come to ``_save``, in every release."""
        if self.pipeline is not None or (self.stowed is not None and self.stowed.shares_weights):
            self._save(output_dir)
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As Hugging Face's, without the pickle of the arguments; ``config.yaml`` has them."""
        if self.stowed is not None and self.stowed.shares_weights and state_dict is None:
            # A collective, while Hugging Face makes a state dict only where it writes.
            state_dict = self.stowed.gathered(keep=bool(self.args.should_save))
        super()._save(output_dir, state_dict)
        (Path(output_dir or str(self.args.output_dir)) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        training_state.save(self, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with _as_config_error():
                training_state.load(self, Path(checkpoint))

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: the loss scale is saved with the optimizer."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: the loss scale is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with _as_config_error():
                said = training_state.load_random_state(self, Path(checkpoint))
            if said is not None:
                write_line(said)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Let Hugging Face write a draft, and have it committed beside training; a collective.

        Raises:
            NotSaved: on every rank, if one cannot write, or if the save before could not be sealed.
        """
        self.settle()
        output_dir, writes = Path(str(self.args.output_dir)), bool(self.args.should_save)
        name = f"checkpoint-{self.state.global_step}"
        former = self.state.best_model_checkpoint
        started: list[saving.Save] = []

        def start(folder: Path) -> None:
            seals = self._commit(folder / name, output_dir / name) if writes else None
            started.append(saving.Save(output_dir / name, seals, former))

        try:
            with saving.draft(output_dir, writes=writes) as folder:
                saving.together(lambda: self._write(folder, model, trial))
                self.state.best_model_checkpoint = self._best(output_dir, former)
                saving.together(lambda: start(folder))
        except OSError as error:
            self.state.best_model_checkpoint = former
            raise _not_saved(output_dir / name, error) from None
        (self._saving,) = started
        if self.args.push_to_hub or any(map(_reads_saves, self.callback_handler.callbacks)):
            self.settle()
        if self.args.push_to_hub and (output_dir / name).is_dir():
            super()._push_from_checkpoint(str(output_dir / name))

    def settle(self) -> None:
        """Wait until the newest save is over on all ranks, if that was not done yet; a collective.

        Raises:
            NotSaved: on every rank, if it could not be sealed; older checkpoints are as they were.
        """
        save = self._saving
        if save is None:
            return
        try:
            lines = save.settle()
        except OSError as error:
            self._saving = None
            self.state.best_model_checkpoint = save.best
            raise _not_saved(save.folder, error) from None
        self._saving = None  # not before: who interrupts this waits for it in ``train``
        for line in lines:
            write_line(line)

    def _write(self, folder: Path, model: torch.nn.Module, trial: Any) -> None:
        """Hugging Face's save, without the barrier that it has in the middle where there is a best step.

        A rank that cannot write would not come to it; all ranks meet after it.
        """
        best, self.state.best_global_step = self.state.best_global_step, None
        self._draft = folder
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._draft, self.state.best_global_step = None, best

    def _best(self, output_dir: Path, former: str | None) -> str | None:
        """The best checkpoint by the name that it will have; Hugging Face has looked for it in the draft."""
        best = self.state.best_global_step
        is_there = best == self.state.global_step or (best and (output_dir / f"checkpoint-{best}").is_dir())
        return str(output_dir / f"checkpoint-{best}") if is_there else former

    def _commit(self, written: Path, folder: Path) -> Callable[[], list[str]]:
        """What seals the draft; it uses nothing of the model, which trains meanwhile."""
        training_state.check(self, written)
        self.state.save_to_json(str(written / "trainer_state.json"))  # with the best one's name
        named = (name for name, _ in self.accelerator.unwrap_model(self.whole).named_buffers())
        buffers = {key for name in named for key in (name, f"{name}.{WEIGHT}")}  # in the model's files, and as a span
        loss = float(self.last_loss) if hasattr(self, "last_loss") else None
        step, keep, best = self.state.global_step, self.keep, self.state.best_model_checkpoint
        same_modes(written)

        def seal() -> list[str]:
            saving.commit(written, folder, lambda: saving.manifest_of(self.about, step, written, loss, buffers))
            try:
                return [] if keep is None else prune(folder.parent, keep, step, Path(best) if best else None)
            except OSError as error:  # the new one is saved nevertheless
                return [f"{folder.parent}: older checkpoints could not be deleted: {error}"]

        return seal

    def _get_output_dir(self, trial: Any) -> str:
        """Where Hugging Face writes and looks for checkpoints: the draft while one is written."""
        return str(self._draft) if self._draft is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing while the draft is written: it is uploaded in the background, so it must have its name first."""
        if self._draft is None:
            super()._push_from_checkpoint(checkpoint_folder)


def _reads_saves(callback: TrainerCallback) -> bool:
    """Whether a callback that is not ours may look for the checkpoint when it hears of a save; on all ranks alike."""
    kind = type(callback)
    if kind.on_save is TrainerCallback.on_save or kind.on_save.__module__.startswith("trainer."):
        return False
    uploads = getattr(getattr(callback, "_log_model", None), "value", None) == "checkpoint"
    return kind.__name__ != "TrackioCallback" and (kind.__name__ != "WandbCallback" or uploads)


def _not_saved(folder: Path, error: OSError) -> saving.NotSaved:
    return saving.NotSaved(f"{folder} was not saved: {error}; older ones are as they were")


@contextmanager
def _as_config_error() -> Iterator[None]:
    """A ``ConfigError`` instead of a ``ValueError`` that says why a checkpoint cannot be resumed."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from None


def _mean_over_tokens(prediction: EvalPrediction) -> dict[str, float]:
    rows: Any = prediction.predictions  # what token_losses made of each sequence: [N, 2]
    loss, tokens = rows.astype("float64").sum(axis=0)
    return {"token_loss": float(loss / max(tokens, 1.0)), "tokens": int(tokens)}
