"""What a model saves for backward under Liger's kernels, counted by stand-ins: Triton runs on no CPU, and needs values.

Read in liger-kernel 0.8.5, and compared to the byte with what its own functions saved there, no kernel launched:

    RMSNorm                       its input, and one fp32 number per row; its gradient is written over the one it gets
    SwiGLU                        both products, gate and up; their gradients are written over them
    rotary embedding              cosine and sine, as the plain one, which is counted
    linear layer with its loss    the gradients of hidden states and of the head's weight, which forward makes in chunks
                                  of tokens; no logits

A stand-in saves tensors of these shapes and makes those that are temporary. Families are those of which the whole list
of what Liger replaces was read; others count as without Liger, which is more.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model.attention import LIGER

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


def counted(model: Any, config: RunConfig) -> Any:
    """``model``, which has no storage; where Liger replaces a part of it, that part now saves what Liger's saves.

    Raises ConfigError if Liger has replaced parts of all models of its family, since an earlier run in this process.
    """
    training = config.training
    if computes(model):
        what = "Liger has replaced parts of all its models in this process, whose memory cannot be counted any more"
        raise ConfigError(f"{model.config.model_type}: {what}; plan and train in a new process")
    if not training.use_liger_kernel or model.config.model_type not in LIGER:
        return model
    on = {"rms_norm": True, "swiglu": True, "fused_linear_cross_entropy": True, **(training.liger_kernel_config or {})}
    for module in model.modules():
        name = type(module).__name__
        if on["rms_norm"] and name.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif on["swiglu"] and name.endswith("MLP"):
            module.forward = partial(_mlp, module)
    if on["fused_linear_cross_entropy"] and config.chosen_task.language and not training.label_smoothing_factor:
        base = model.get_base_model() if config.model.lora is not None else model
        if isinstance(head := base.get_output_embeddings(), nn.Linear):
            head.forward = nn.Identity().forward  # type: ignore[method-assign]
            base.loss_function = partial(_loss, head)
    return model


def computes(model: nn.Module) -> bool:
    """Whether Liger has replaced a part of ``model``, or the function of its rotary embedding."""
    functions = [function for module in model.modules() for function in (module.forward, _rotary_of(module))]
    return any(getattr(function, "__module__", "").startswith("liger_kernel") for function in functions)


def _rotary_of(module: nn.Module) -> object:
    return getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)


def _norm(module: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = _RMSNorm.apply(hidden, module.weight)
    return normed


def _mlp(module: Any, hidden: Tensor) -> Any:
    return module.down_proj(_SwiGLU.apply(module.gate_proj(hidden), module.up_proj(hidden)))


def _loss(head: nn.Module, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The loss of ``logits``, which are the hidden states."""
    loss: Tensor = _LinearLoss.apply(logits.flatten(0, -2), head.weight)
    return loss


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.empty_like(ctx.saved_tensors[1])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate.view_as(gate), up.view_as(up)


class _LinearLoss(torch.autograd.Function):
    """Logits of so many tokens at a time that they are about as large as the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        (tokens, width), words = hidden.shape, weight.shape[0]
        grad, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight) if weight.requires_grad else None
        at_once = 1 << (-(-tokens // -(-words // width)) - 1).bit_length()
        for chunk in hidden.split(min(tokens, at_once)):
            logits = chunk @ weight.t()
            if of_weight is not None and logits.dtype is torch.float32:  # in 16 bits GPUs from Ampere on add in place
                torch.empty_like(weight)
            del logits
        ctx.save_for_backward(grad, of_weight)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors
