"""Quantisation-aware training: which linear layers round their weights in forward, and what that saves for backward.

torchao replaces the layers (``few_bits.py``), where it is installed. Forward then computes each rounded
weight anew, from the exact one, and backward passes its gradient on to the exact one as if nothing had been rounded
(straight through). So names, parameters, optimizer and checkpoints are those of training without it.

Memory. For backward each of these layers saves two tensors of the size of its weight: the rounded one, and the numbers
that were clamped; with them two scales for each group. ``counted`` gives a model without storage layers that save the
same, so that a plan needs no torchao; ``tests/unit/test_qat.py`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.recipes.quantize import QuantizeSection


def layers_of(model: Any, config: RunConfig, section: QuantizeSection) -> dict[str, nn.Linear]:
    """The layers that Transformers quantises by group. ConfigError: there are none, groups do not divide one, or one
    that is to be trained so computes otherwise than a linear layer, by which torchao replaces it.
    """
    skipped = HfQuantizer.get_modules_to_not_convert(model, section.llm_int8_skip_modules, model._keep_in_fp32_modules)
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layers = {name: layer for name, layer in linears.items() if should_convert_module(f"{name}.weight", skipped)}
    if not layers:
        what = f"torchao quantises torch's linear layers, and a {model.config.model_type} model has none; write int8"
        raise config.error("quantize.formats", section.formats, what)
    for key, layer in layers.items():
        if layer.in_features % section.group_size:
            fits = math.gcd(layer.in_features, section.group_size)
            if fits == 1:  # torchao takes none so small
                fits = next(
                    (size for size in range(2, layer.in_features) if layer.in_features % size == 0), layer.in_features
                )
            what = f"does not divide the {layer.in_features} inputs of {key}; {fits} does"
            raise config.error("quantize.group_size", section.group_size, what)
        if section.qat is not None and type(layer).forward is not nn.Linear.forward:
            what = (
                f"torchao trains torch's linear layers, and {key} is a {type(layer).__name__}, which computes otherwise"
            )
            raise config.error("quantize.qat", section.qat, what)
    return layers


def counted(model: Any, config: RunConfig, section: QuantizeSection) -> Any:
    """``model``, which has no storage; if ``quantize.qat`` is set its layers now save for backward what torchao's save.
    ConfigError: ``layers_of``.
    """
    if section.qat is not None:
        layers: Mapping[str, Any] = layers_of(model, config, section)
        for layer in layers.values():
            layer.forward = partial(_rounded, layer, section.group_size)
    return model


def _rounded(layer: nn.Linear, group_size: int, x: Tensor) -> Tensor:
    """Forward of ``layer`` with torchao's operations on its weight, in their order."""
    groups = layer.weight.view(layer.out_features, -1, group_size)
    scale = groups.detach().abs().amax(-1, keepdim=True) / 8
    zero = torch.zeros_like(scale, dtype=torch.int32)
    numbers = (groups * (1 / scale)).round().add(zero).clamp(-8, 7)
    return linear(x, (numbers - zero.to(scale.dtype)).mul(scale).view_as(layer.weight), layer.bias)
