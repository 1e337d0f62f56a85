"""Low-rank adapters (PEFT): given learning rates of their own (LoRA+), and merged into the weights.

Merging adds the adapters to the weights. A quantised weight would have to be quantised again, and would not be what was
trained; so they are merged into the base as it computes: dequantised, in the dtype that the model has otherwise.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from deepstow.strategies.core.layout import Layout

PREFIX = "base_model.model."  # peft's, of names in a model that has adapters
OURS = {"loraplus_lr_ratio", "export"}  # keys that peft.LoraConfig does not have


def loraplus(model: Any, kind: type, ratio: float, decay: float, **options: Any) -> Any:
    """PEFT's optimizer of LoRA+: ``B`` of each adapter learns ``ratio`` times as fast as ``A``."""
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay, **options)


def loraplus_groups(model: nn.Module, ratio: float) -> dict[str, int]:
    """The number of the group that each trained parameter is in under LoRA+."""
    import torch

    made = loraplus(model, torch.optim.SGD, ratio, 0.0, lr=1.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(each)]: number for number, group in enumerate(made.param_groups) for each in group["params"]}


def merged(model: Any) -> PreTrainedModel:
    """The base with its adapters added to its weights: itself, or another model if it is quantised."""
    from deepstow.strategies.engine.tensors.quantised import is_quantised

    base = model.get_base_model()
    if not any(map(is_quantised, base.parameters())):
        return cast("PreTrainedModel", model.merge_and_unload())
    from peft import get_peft_model

    config = deepcopy(base.config)
    del config.quantization_config
    plain = type(base)(config)
    plain.own_use_cache = base.own_use_cache
    adapted: Any = get_peft_model(plain, deepcopy(model.peft_config["default"]))
    missing, _ = adapted.load_state_dict({**dict(model.named_buffers()), **_weights(model)}, strict=False, assign=True)
    assert not missing, missing
    return cast("PreTrainedModel", adapted.merge_and_unload())


def round_base(model: nn.Module, layout: Layout | None) -> None:
    """Round what rested in a format of its own while ``layout`` trained, in a base that was loaded for its adapters. A
    weight that is so already does not change.
    """
    from deepstow.strategies.engine.codecs import once_encoded

    buckets = [] if layout is None else [bucket for bucket in layout.buckets if bucket.frozen_as]
    formats = {name.removeprefix(PREFIX): bucket.frozen_as for bucket in buckets for name in bucket.params}
    for name, parameter in model.named_parameters():
        if name in formats:
            parameter.data = once_encoded(parameter.data, formats[name])


def _weights(model: Any) -> dict[str, Any]:
    """All parameters by name on the CPU, as they are computed with."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    from deepstow.strategies.engine.tensors.quantised import is_quantised

    found = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            whole = dequantize_bnb_weight(weight, getattr(module, "state", None)) if is_quantised(weight) else weight
            whole = whole.detach().cpu()
            found[f"{path}.{name}"] = whole.to(model.dtype) if is_quantised(weight) else whole
    return found
