"""Quantised base weights (QLoRA): the linear layers in 4 or 8 bits, by bitsandbytes, as Transformers replaces them.

A saved model is quantised by Transformers while it is loaded. ``quantise`` does the same to a model that is there: one
with random weights, or on the meta device, where the plan learns the true bytes. Both give the same bits.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.install import needs
from deepstow.trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from deepstow.trainer.config.sections import QuantizationSection


def config_of(section: QuantizationSection) -> Any:
    """Hugging Face's ``BitsAndBytesConfig``. Raise ConfigError if bitsandbytes is not installed."""
    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"model.quantization_config: {needs('bitsandbytes', 'qlora')}")
    return BitsAndBytesConfig(**section.model_dump(exclude_none=True))


def loading(section: QuantizationSection | None, dtype: str) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a quantised model, on the CPU as others; none if it is not."""
    if section is None:
        return {}
    return {"quantization_config": config_of(section), "device_map": {"": "cpu"}, "dtype": dtype}


def quantise(model: PreTrainedModel, section: QuantizationSection) -> PreTrainedModel:
    """Replace the linear layers of ``model``, whose weights are there, or have no storage."""
    import torch
    from bitsandbytes import functional
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import AutoHfQuantizer

    functional.quantize_blockwise(torch.zeros(1))  # makes its table now, and not without storage
    former_layers: dict[str, Any] = dict(model.named_modules())
    quantizer: Any = AutoHfQuantizer.from_config(config_of(section), pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    for name, layer in model.named_modules():
        former = former_layers[name]
        if layer is not former:
            weight = former._parameters.pop("weight").detach()
            layer.weight = _packed(layer.weight, weight.T if isinstance(former, Conv1D) else weight)
            layer.bias = former.bias
            if former.bias is not None:
                former.bias.requires_grad_(False)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return model


def _packed(empty: Any, weight: Tensor) -> Any:
    """What ``empty.to("cpu")`` makes of its weight, also of one without storage."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import Int8Params, Params4bit

    attributes = {key: value for key, value in vars(empty).items() if key not in ("quant_state", "bnb_quantized")}
    if isinstance(empty, Int8Params):
        numbers, scales, _ = functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
        return Int8Params(numbers, requires_grad=False, **attributes | {"CB": numbers, "SCB": scales})
    kind = {key: attributes[key] for key in ("blocksize", "compress_statistics", "quant_type", "quant_storage")}
    numbers, state = functional.quantize_4bit(weight.contiguous(), **kind)
    empty.module.quant_state = state
    return Params4bit(numbers, requires_grad=False, quant_state=state, bnb_quantized=True, **attributes)
