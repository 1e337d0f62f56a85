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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.trainer.errors import ExitCode, UserError
from deepstow.trainer.run.pipeline_trainer import PipelineTrainer

MINIMAL_SCALE = 1.0
DEEPSPEED_SAYS = "Current loss scale already at minimum"


class NonFinite(UserError):
    """Gradients are not finite, and the run has ended."""

    code = ExitCode.NON_FINITE


class StopNonFinite(TrainerCallback):
    """Checks the gradient norm before each update; not where the memory engine skips such steps itself.

    On an accelerator this waits for the device once per step, as Hugging Face's own filter of losses does.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        norm = accelerator.last_norm
        skips = accelerator.stowed is not None and accelerator.scaler is None
        if skips or norm is None or bool(torch.as_tensor(norm).isfinite()):
            return
        if args.fp16 and _can_be_lowered(accelerator.scaler):
            return
        state.global_step += 1  # the step that is not taken; its numbers are logged nevertheless
        self._trainer.log({"loss": float(self._trainer.last_loss), "grad_norm": float(norm)})
        raise self._trainer.not_finite(state.global_step, f"the gradient norm is {float(norm)}")


def _can_be_lowered(scaler: Any) -> bool:
    """Whether overflows are expected, since fp16's loss scale is being found. DeepSpeed raises if it cannot."""
    return scaler is None or float(scaler.get_scale()) > MINIMAL_SCALE


def first_not_finite(trainer: PipelineTrainer, gradient: str | None) -> str:
    """What was not finite first, in words; to be called on every rank, since a forward may be a collective.

    The engine knows the name of a parameter whose ``gradient`` was not. Of a pipeline all stages look, and the first in
    the order of computing counts; in backward that is the last one. So do ranks that divide experts.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    gradients = iter([] if gradient is None else [f"the gradient of {gradient}"])
    if gradient is None and trainer.stowed is None and not trainer.is_deepspeed_enabled:
        gradients = _bad_gradients(model, trainer.backward_again)
    phases = ((1, _bad_weights(model)), (1, _bad_outputs(model, trainer.forward_again)), (-1, gradients))
    for order, phase in phases:
        mine = (trainer.pipeline.position if trainer.pipeline else 0, next(phase, None))
        found = [mine]
        if trainer.pipeline is not None or trainer.accelerator.experts is not None:  # a forward is a collective
            found *= trainer.args.world_size
            torch.distributed.all_gather_object(found, mine)
        for _, what in sorted(found, key=lambda each: order * each[0]):
            if what is not None:
                return str(what)
    return "nothing that could be found again"


def _bad_weights(model: nn.Module) -> Iterator[str]:
    weights = model.state_dict()
    yield from (f"the weight {name}" for name, _ in model.named_parameters() if _is_bad(weights.get(name)))


def _bad_outputs(model: nn.Module, forward: Callable[[], object]) -> Iterator[str]:
    """Modules whose output is not finite, in the order in which they return."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if any(_is_bad(tensor) for tensor in tensors_in(output)) and not any(map(_is_bad, tensors_in(inputs))):
            found.append(f"the output of {name}" if name else "the loss")

    with torch.no_grad(), torch.random.fork_rng(), ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, name)))
        forward()
    yield from found


def _bad_gradients(model: nn.Module, backward: Callable[[], object]) -> Iterator[str]:
    """Parameters whose gradient is not finite, in the order of backward. Clipping has overwritten those of the step."""
    found: list[str] = []

    def look(name: str, param: Tensor) -> None:
        if _is_bad(param.grad):
            found.append(f"the gradient of {name}")

    model.zero_grad()
    with torch.random.fork_rng(), ExitStack() as hooks:
        for name, param in model.named_parameters():
            if param.requires_grad:
                hooks.enter_context(param.register_post_accumulate_grad_hook(partial(look, name)))
        backward()
    model.zero_grad()
    yield from found


def _is_bad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all())
