"""Low-rank adapters (PEFT): added to a model, given learning rates of their own (LoRA+), merged into the weights.

Merging adds the adapters to the weights. A quantised weight would have to be quantised again, and would not be what was
trained; so they are merged into the base as it computes: dequantised, in the dtype that the model has otherwise.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from trainer.config.sections import LoraSection

OURS = {"loraplus_lr_ratio", "export"}  # keys that peft.LoraConfig does not have


def with_lora(model: PreTrainedModel, section: LoraSection) -> PreTrainedModel:
    """Add low-rank adapters to ``model`` and freeze its own weights. ConfigError: ``peft`` is not installed, no module
    matches ``target_modules``, or a quantised one is to be trained in full.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("model.lora: needs the package peft; install it with: pip install 'deepstow[lora]'") from None

    from strategies.engine.tensors.quantised import is_quantised

    options: dict[str, Any] = section.model_dump(exclude_none=True, exclude=OURS)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in (section.modules_to_save or ()) and any(map(is_quantised, module.parameters())):
            raise ConfigError(
                f"model.lora.modules_to_save = {section.modules_to_save!r}: {name} is quantised, and cannot be trained "
                f"in full; name it in model.quantization_config.llm_int8_skip_modules as well"
            )
    try:
        with warnings.catch_warnings():  # peft reads a name that Transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    except ValueError as error:
        kinds = ("Linear", "Linear4bit", "Linear8bitLt", "Conv1D")
        linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if type(m).__name__ in kinds}
        raise ConfigError(
            f"model.lora.target_modules = {section.target_modules!r}: {str(error).splitlines()[0]} "
            f"The model's linear layers are: {', '.join(sorted(linear))}"
        ) from None
    return cast("PreTrainedModel", adapted)  # peft's wrapper forwards all attributes to the model


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
    from strategies.engine.tensors.quantised import is_quantised

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


def _weights(model: Any) -> dict[str, Any]:
    """All parameters by name on the CPU, as they are computed with."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    from strategies.engine.tensors.quantised import is_quantised

    found = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            whole = dequantize_bnb_weight(weight, getattr(module, "state", None)) if is_quantised(weight) else weight
            whole = whole.detach().cpu()
            found[f"{path}.{name}"] = whole.to(model.dtype) if is_quantised(weight) else whole
    return found
