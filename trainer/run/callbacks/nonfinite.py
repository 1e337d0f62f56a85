"""Stop a run whose gradients are not finite; name the first tensor that is not, and the last good checkpoint.

One NaN or infinite gradient spoils every weight in the next update; the run would go on, save them and delete good
checkpoints. Plain training and ZeRO end before the first update with such gradients, so no checkpoint holds them (ZeRO
at stages 1 to 3 has updated by then, but saves nothing any more). The engine first skips three steps in a row
(``strategies/engine/updating/clipping.py``). Under fp16 overflows are part of finding the loss scale; they count
once it is at its minimum of 1.

To find the first such tensor, the last batch is run again: weights are checked, then outputs of modules in their order,
then gradients in the order of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.strategies.engine.transfer.transfer import Event, Transfer, transfer_for
from deepstow.trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from deepstow.trainer.run.trainer import Trainer

MINIMAL_SCALE = 1.0
DEEPSPEED_SAYS = "Current loss scale already at minimum"


class NonFinite(UserError):
    """Gradients are not finite, and the run has ended."""

    code = ExitCode.NON_FINITE


@dataclass(frozen=True, slots=True)
class _Update:
    """An update whose norm the host will know once an event has passed, and what is needed to look for its cause."""

    step: int
    norm: Tensor
    known: Event
    loss: Tensor
    inputs: Any


class StopNonFinite(TrainerCallback):
    """Looks at the gradient norm of each update; not where the memory engine skips such steps itself.

    On the host the norm is known before the update. On an accelerator nobody waits for it: a fused optimizer skips this
    update and all later ones by a number on the device, the one that torch's scaler of losses sets, and the host looks
    when the norm has come. ``settle`` waits for all norms: before a record, and before weights are evaluated or saved.
    Ranks look together, at the norm of the step before. Other optimizers cannot skip; their norms are waited for.

    A scaler of losses (fp16) skips updates itself, and knows it after the update.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting: list[_Update] = []
        self._bad: Tensor | None = None  # on the device; 1.0: the norm of some update was not finite
        self._transfer: Transfer | None = None

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if trainer.stowed is not None or accelerator.last_norm is None or args.fp16:  # DeepSpeed has a scale, too
            return
        self._look(waits=args.world_size > 1)
        norm = torch.as_tensor(accelerator.last_norm).detach()
        self._transfer = self._transfer or transfer_for(norm.device)
        told = self._transfer.to_host(norm)
        self._waiting.append(_Update(state.global_step + 1, *told, trainer.last_loss, trainer.last_inputs))
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate wraps it
        if norm.device.type == "cpu" or not getattr(optimizer, "_step_supports_amp_scaling", False):
            self.settle()
            return
        bad = norm.isfinite().logical_not().float()
        self._bad = optimizer.found_inf = bad if self._bad is None else torch.maximum(self._bad, bad)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        if accelerator.scaler is None or accelerator.last_norm is None or not accelerator.optimizer_step_was_skipped:
            return
        if float(accelerator.scaler.get_scale()) < MINIMAL_SCALE:  # lowered from the minimum
            self._end(state.global_step + 1, float(accelerator.last_norm), float(self._trainer.last_loss))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:
            self.settle()

    def settle(self) -> None:
        """Raise NonFinite if the norm of an update was not finite; waits for the norms of all."""
        self._look(waits=True)

    def _look(self, *, waits: bool) -> None:
        while self._waiting:
            update, transfer = self._waiting[0], self._transfer
            assert transfer is not None
            if not transfer.done(update.known):
                if not waits:
                    return
                transfer.host_wait(update.known)
            self._waiting.pop(0)
            if not update.norm.isfinite():
                self._waiting.clear()
                self._trainer.last_inputs = update.inputs
                self._end(update.step, float(update.norm), float(update.loss))

    def _end(self, step: int, norm: float, loss: float) -> None:
        """The step was not taken; its numbers are logged nevertheless."""
        self._trainer.state.global_step = step
        self._trainer.log({"loss": loss, "grad_norm": norm})
        raise self._trainer.not_finite(step, f"the gradient norm is {norm}")


def first_not_finite(trainer: Trainer, gradient: str | None) -> str:
    """What was not finite first, in words; to be called on every rank, since a forward may be a collective.

    The engine knows the name of a parameter whose ``gradient`` was not. Of a pipeline all stages look, and the first in
    the order of computing counts; in backward that is the last one. So do ranks that divide experts.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    gradients = iter([] if gradient is None else [f"the gradient of {gradient}"])
    if gradient is None and trainer.stowed is None and not trainer.is_deepspeed_enabled:
        gradients = _bad_gradients(model, partial(trainer.execution.backward_again, trainer))
    phases = (
        (1, _bad_weights(model)),
        (1, _bad_outputs(model, partial(trainer.execution.forward_again, trainer))),
        (-1, gradients),
    )
    for order, phase in phases:
        verdict = (trainer.execution.position, next(phase, None))
        verdicts = [verdict]
        if trainer.execution.forward_is_collective:
            verdicts *= trainer.args.world_size
            torch.distributed.all_gather_object(verdicts, verdict)
        for _, what in sorted(verdicts, key=lambda each: order * each[0]):
            if what is not None:
                return str(what)
    return "nothing that could be found again"


def _bad_weights(model: nn.Module) -> Iterator[str]:
    weights = model.state_dict()
    yield from (f"the weight {name}" for name, _ in model.named_parameters() if _is_bad(weights.get(name)))


def _bad_outputs(model: nn.Module, forward: Callable[[], object]) -> Iterator[str]:
    """Modules whose output is not finite, in the order in which they return."""
    culprits: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if any(_is_bad(tensor) for tensor in tensors_in(output)) and not any(map(_is_bad, tensors_in(inputs))):
            culprits.append(f"the output of {name}" if name else "the loss")

    with torch.no_grad(), torch.random.fork_rng(), ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, name)))
        forward()
    yield from culprits


def _bad_gradients(model: nn.Module, backward: Callable[[], object]) -> Iterator[str]:
    """Parameters whose gradient is not finite, in the order of backward. Clipping has overwritten those of the step."""
    culprits: list[str] = []

    def look(name: str, param: Tensor) -> None:
        if _is_bad(param.grad):
            culprits.append(f"the gradient of {name}")

    model.zero_grad()
    with torch.random.fork_rng(), ExitStack() as hooks:
        for name, param in model.named_parameters():
            if param.requires_grad:
                hooks.enter_context(param.register_post_accumulate_grad_hook(partial(look, name)))
        backward()
    model.zero_grad()
    yield from culprits


def _is_bad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all())
