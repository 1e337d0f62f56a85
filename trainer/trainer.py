"""The loop is Hugging Face's. This file holds what we change in it, and nothing else.

* the Accelerator is ours (``trainer/accelerator.py``);
* evaluation loss is the mean over *tokens*, not over batches, so perplexity is right when lengths differ;
* every log record gets our numbers before anyone sees it (``trainer/callbacks.py``);
* with a memory engine the model is not moved to the device, and optimizer state is saved bucket by bucket;
* a checkpoint is marked complete by a file written after all ranks have written theirs, and only such a checkpoint
  is resumed automatically.

``logging_nan_inf_filter`` is off: a loss that is not finite is logged as it is.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from strategies.runtime import StowOptimizer
from trainer.accelerator import StowAccelerator
from trainer.callbacks import Meter, write_line
from trainer.checkpoint import mark_complete, prune, unmark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

    from trainer.ledger import Ledger

    Maker = Callable[[torch.nn.Module, Collection[str]], StowOptimizer]

IGNORED = -100
OPTIMIZER, SCHEDULER = "optimizer", "scheduler.pt"  # in a checkpoint; the scheduler's is Hugging Face's name


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` with our accelerator, token-weighted evaluation and log records.

    Args:
        meter: counts tokens and time; fills each record.
        own_clipping: largest norm, if we clip between backward and step (ZeRO stage 0 in fp32, see
            ``trainer/accelerator.py``); ``args.max_grad_norm`` is then 0, so that nobody clips twice.
        ledger: counts what forward saves, once; also one of ``callbacks``.
        maker: makes the optimizer of a memory engine, which hooks the model; None: Hugging Face's optimizers.
    """

    def __init__(
        self,
        *args: Any,
        meter: Meter,
        own_clipping: float | None,
        maker: Maker | None = None,
        ledger: Ledger | None = None,
        **kwargs: Any,
    ) -> None:
        self.meter, self.ledger, self._maker = meter, ledger, maker
        self._own_clipping = own_clipping
        self._accelerator_args: dict[str, Any] = {}
        kwargs |= {"compute_metrics": _mean_over_tokens, "preprocess_logits_for_metrics": _token_losses}
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Build Hugging Face's accelerator, with all its checks, then ours from the same arguments.

        Accelerate keeps its process state, the DeepSpeed plugin included, in one shared place; the second
        construction takes it from there.
        """
        super().create_accelerator_and_postprocess()
        again = {name: value for name, value in self._accelerator_args.items() if name != "deepspeed_plugin"}
        self.accelerator = StowAccelerator(**again)
        self.gather_function = self.accelerator.gather_for_metrics
        self.accelerator.max_grad_norm = self._own_clipping

    @property
    def stowed(self) -> StowOptimizer | None:
        """The memory engine's optimizer, where the plan has a layout and training has begun."""
        return self.optimizer if isinstance(self.optimizer, StowOptimizer) else None

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As Hugging Face's, or the memory engine's."""
        if self._maker is None or self.optimizer is not None:
            return super().create_optimizer(*(() if model is None else (model,)))
        assert self.model is not None
        self.optimizer = self._maker(self.model, self.get_decay_parameter_names(self.model))
        if self.stowed is not None and self.is_world_process_zero():
            for line in self.stowed.engine.arena.owners():
                write_line(line)
        return self.optimizer

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """As Hugging Face's, but an engine moves the model itself, as far as the plan says."""
        if self._maker is None:
            super()._move_model_to_device(model, device)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As Hugging Face's, but an engine's state goes to disk bucket by bucket, without a second copy in memory."""
        if self.stowed is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            self.stowed.save(Path(output_dir) / OPTIMIZER)
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.stowed is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.stowed.load(Path(checkpoint) / OPTIMIZER)
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any, **more: Any) -> torch.Tensor:
        self.meter.count(inputs["input_ids"].numel())
        return super().training_step(model, inputs, *rest, **more)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        with self.ledger.counting(model, self.state.global_step) if self.ledger else nullcontext():
            return super().compute_loss(model, inputs, *rest, **more)

    def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        self.meter.add_to(logs, self.state)
        super().log(logs, *rest, **more)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """As Hugging Face's; the loss is the mean over trained tokens."""
        kwargs["metric_key_prefix"] = metric_key_prefix
        output = super().evaluation_loop(*args, **kwargs)
        metrics = output.metrics or {}
        if f"{metric_key_prefix}_token_loss" in metrics:
            metrics[f"{metric_key_prefix}_loss"] = metrics.pop(f"{metric_key_prefix}_token_loss")
        return output

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """As Hugging Face's, then marked complete; older ones are deleted only after that."""
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
    losses = cross_entropy(scores[:, :-1].float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return torch.stack([losses.sum(dim=1), targets.ne(IGNORED).sum(dim=1).float()], dim=1)


def _mean_over_tokens(prediction: EvalPrediction) -> dict[str, float]:
    rows: Any = prediction.predictions  # what _token_losses made of each sequence: [N, 2]
    loss, tokens = rows.astype("float64").sum(axis=0)
    return {"token_loss": float(loss / max(tokens, 1.0)), "tokens": int(tokens)}
