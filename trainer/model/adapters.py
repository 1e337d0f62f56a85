"""Low-rank adapters (PEFT): saved ones that training goes on with, learning rates of their own (LoRA+), and merging.

Merging adds the adapters to the weights. A quantised weight would have to be quantised again, and would not be what was
trained; so they are merged into the base as it computes: dequantised, in the dtype that the model has otherwise.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepstow.trainer.errors import ConfigError, first_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from deepstow.strategies.core.layout import Layout

MERGE = "merge it into its base (PEFT's merge_and_unload), name that in model.name_or_path, and train a new one"
PREFIX = "base_model.model."  # peft's, of names in a model that has adapters
OURS = {"loraplus_lr_ratio", "export"}  # keys that peft.LoraConfig does not have
INITIAL = (True, False, "gaussian")  # values of init_lora_weights that leave the base as it is
# What the configuration of a saved adapter may say otherwise than peft's defaults.
TAKEN = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "bias", "modules_to_save", "use_rslora", "use_dora",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules", "fan_in_fan_out",
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_type", "peft_version",
}  # fmt: skip


def config_of(folder: str, task_type: str, dropout: float) -> Any:
    """peft's config of a saved adapter that is trained on. Raise ConfigError for what is not trained here."""
    from peft import LoraConfig

    option = f"model.adapter = {folder!r}"
    try:
        saved: Any = LoraConfig.from_pretrained(folder)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option}: peft cannot read its configuration: {first_line(error)}") from None
    if saved.task_type not in (None, task_type):
        what = f"it is an adapter for {saved.task_type}, and the task needs one for {task_type}"
        raise ConfigError(f"{option}: {what}; {MERGE}")
    usual = LoraConfig().to_dict()
    for key, value in saved.to_dict().items():
        if key not in TAKEN and value != usual.get(key) and not (key == "init_lora_weights" and value in INITIAL):
            raise ConfigError(f"{option}: it has {key} = {value!r}, with which training does not go on here; {MERGE}")
    saved.inference_mode = False
    saved.task_type = task_type
    saved.lora_dropout = dropout
    return saved


def load(model: Any, folder: str) -> None:
    """Give ``model`` the values of a saved adapter; on the device meta only look whether it is one of this model. Raise
    ConfigError if it is not.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    option, path = f"model.adapter = {folder!r}", Path(folder) / "adapter_model.safetensors"
    params = get_peft_model_state_dict(model, dict(model.named_parameters()), save_embedding_layers=False)
    needed = {name: tuple(param.shape) for name, param in params.items()}
    try:
        with safe_open(path, "pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{option}: {path.name} cannot be read: {first_line(error)}; copy it anew") from None
    for name in sorted(needed.keys() | saved.keys()):
        if needed.get(name) != saved.get(name):
            has, needs = (f"has {shape}" if shape else "has none" for shape in (saved.get(name), needed.get(name)))
            what = f"of {name.removeprefix(PREFIX)} the adapter {has}, and the model {needs}"
            raise ConfigError(f"{option}: {what}; name the base that it was trained on in model.name_or_path")
    if not next(model.parameters()).is_meta:
        set_peft_model_state_dict(model, load_file(path))


def loraplus(model: Any, kind: type, ratio: float, decay: float, **options: Any) -> Any:
    """PEFT's optimizer of LoRA+: ``B`` of each adapter learns ``ratio`` times as fast as ``A``."""
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay, **options)


def loraplus_groups(model: nn.Module, ratio: float) -> dict[str, int]:
    """The number of the group that each trained parameter is in under LoRA+."""
    import torch

    optim = loraplus(model, torch.optim.SGD, ratio, 0.0, lr=1.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(param)]: number for number, group in enumerate(optim.param_groups) for param in group["params"]}


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

    weights = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            value = dequantize_bnb_weight(weight, getattr(module, "state", None)) if is_quantised(weight) else weight
            value = value.detach().cpu()
            weights[f"{path}.{name}"] = value.to(model.dtype) if is_quantised(weight) else value
    return weights
