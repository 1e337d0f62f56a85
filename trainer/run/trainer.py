"""What DeepStow changes in Hugging Face's Trainer.

* with a memory engine it is a stowed trainer (``trainer/run/stowed_trainer.py``), with the plan of the config;
* evaluation loss is the mean over *tokens*, not over batches, so perplexity is right when lengths differ;
* our numbers are in every log record before any callback sees it (``trainer/run/callbacks.py``);
* a run whose gradients are not finite ends (``trainer/run/nonfinite.py``);
* a checkpoint is marked complete by a file written after all ranks have written theirs, and only such a checkpoint
  is resumed automatically.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from strategies.engine import NonFiniteError
from trainer.data.packing import MASKED
from trainer.run.callbacks import Meter
from trainer.run.checkpoint import mark_complete, prune, unmark
from trainer.run.nonfinite import DEEPSPEED_SAYS, StopNonFinite, described
from trainer.run.stowed_trainer import StowedTrainer

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

    from strategies.core.plan import Plan
    from trainer.run.plan_check import PlanCheck


class Trainer(StowedTrainer, transformers.Trainer):
    """``transformers.Trainer`` with our accelerator, token-weighted evaluation and log records.

    Args:
        meter: counts tokens and time; fills each record.
        plan: of the run; with a layout the memory engine trains.
        plan_check: compares the plan with the run; also one of ``callbacks``.
    """

    plan: Plan
    last_inputs: dict[str, Any]
    last_loss: torch.Tensor

    def __init__(self, *args: Any, meter: Meter, plan: Plan, plan_check: PlanCheck | None, **kwargs: Any) -> None:
        self.meter, self.plan_check, self.plan = meter, plan_check, plan
        kwargs |= {"compute_metrics": _mean_over_tokens, "preprocess_logits_for_metrics": _token_losses}
        super().__init__(*args, **kwargs)
        self.add_callback(StopNonFinite(self))

    @property
    def stows(self) -> bool:
        """Whether the plan has a layout, so that the memory engine trains."""
        return self.plan.layout is not None

    def make_plan(self, groups: list[dict[str, Any]], moments: int) -> Plan:
        """The plan of the run."""
        return self.plan

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's.

        Raises:
            NonFinite: gradients are not finite.
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

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """As Hugging Face's, but the loss is the mean over trained tokens."""
        kwargs["metric_key_prefix"] = metric_key_prefix
        output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        metrics = output.metrics or {}
        if f"{metric_key_prefix}_token_loss" in metrics:
            metrics[f"{metric_key_prefix}_loss"] = metrics.pop(f"{metric_key_prefix}_token_loss")
        return output

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save as Hugging Face does, mark the checkpoint complete, and only then delete older ones."""
        folder, is_first = Path(str(self.args.output_dir)), self.args.process_index == 0
        unmark(folder, self.state.global_step, is_first=is_first)
        keep, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = keep
        mark_complete(folder, self.state.global_step, is_first=is_first)
        if keep is not None and is_first:
            prune(folder, keep, self.state.best_model_checkpoint)


def _token_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Per sequence: summed negative log-likelihood and number of predicted tokens. [B, S, V], [B, S] -> [B, 2]."""
    scores = logits[0] if isinstance(logits, tuple) else logits
    targets = labels[:, 1:]
    losses = cross_entropy(scores[:, :-1].float().transpose(1, 2), targets, ignore_index=MASKED, reduction="none")
    return torch.stack([losses.sum(dim=1), targets.ne(MASKED).sum(dim=1).float()], dim=1)


def _mean_over_tokens(prediction: EvalPrediction) -> dict[str, float]:
    rows: Any = prediction.predictions  # what _token_losses made of each sequence: [N, 2]
    loss, tokens = rows.astype("float64").sum(axis=0)
    return {"token_loss": float(loss / max(tokens, 1.0)), "tokens": int(tokens)}
