"""Quantised weights: frozen parameters of whole numbers (``Params4bit``, ``Int8Params`` of bitsandbytes) with scales.

The numbers are moved as those of any other frozen parameter. Their scales are tensors in attributes beside them, much
smaller, and stay on the device. A layer of 8 bits computes with a second reference to its weight's memory, which would
go on showing the old place: while a model is stowed that reference is the parameter itself.

Where a CPU has AVX512-BF16, bitsandbytes packs 4-bit weights anew at the first evaluation, and a layer packed so passes
no gradient back. Layers are told not to (``keep_packing``).

No bitsandbytes is imported here: a model that has such weights has brought it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("Params4bit", "Int8Params")


def is_quantised(param: Tensor) -> bool:
    """Whether its numbers stand for a weight, and are none themselves; a stowed one is known by its dtype."""
    return type(param).__name__ in KINDS or param.dtype in (torch.uint8, torch.int8)


def num_weights(param: Any) -> int:
    """How many weights its numbers stand for."""
    state = getattr(param, "quant_state", None)
    return int(param.numel()) if state is None else int(torch.Size(state.shape).numel())


def complaints(model: nn.Module) -> Iterator[str]:
    """Why quantised weights of ``model`` cannot be moved, one line each."""
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if weight is None or type(weight).__name__ not in KINDS:
            continue
        state, bias = getattr(weight, "quant_state", None), getattr(module, "bias", None)
        if weight.is_floating_point():
            yield f"{name}.weight: a {type(weight).__name__} that is not quantised yet: move its layer to the CPU"
        elif getattr(state, "packing_format_for_cpu", False):
            yield f"{name}.weight: packed anew for inference on the CPU: stow the model before it is evaluated"
        elif bias is not None and getattr(module, "compute_dtype", None) not in (None, bias.dtype):
            yield f"{name}.bias: is {bias.dtype}, and its layer computes in {module.compute_dtype}: make them the same"


def scales(model: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """The tensors beside quantised weights: each with the object that has it, and the attribute's name."""
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        inner = getattr(state, "state2", None)
        eight = getattr(module, "state", None) if hasattr(weight, "SCB") else None
        for holder, names in ((state, ("absmax", "code", "offset")), (inner, ("absmax", "code"))):
            yield from (
                (holder, name, value) for name in names if isinstance(value := getattr(holder, name, None), Tensor)
            )
        for holder in (weight, eight):
            if isinstance(value := getattr(holder, "SCB", None), Tensor):
                yield holder, "SCB", value


def scales_bytes(model: nn.Module) -> int:
    """Bytes of all scales; tables that layers have in common count once."""
    return sum({value.untyped_storage()._cdata: value.nbytes for *_, value in scales(model)}.values())


def put_scales(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace all scales by what ``convert`` makes of them; tables that layers have in common stay so."""
    converted: dict[int, Tensor] = {}
    for holder, name, value in list(scales(model)):
        if id(value) not in converted:
            converted[id(value)] = convert(value)
        setattr(holder, name, converted[id(value)])


def keep_packing(model: nn.Module) -> None:
    """Evaluate with weights as they are packed for training, from now on."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


class Adopted:
    """The quantised weights of a model as plain parameters with the same attributes, until ``release``; their scales
    are on ``device`` meanwhile.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._model = model
        self._device = device
        keep_packing(model)
        self._kinds = [(param, type(param)) for param in model.parameters() if type(param).__name__ in KINDS]
        self._eight: list[Any] = []
        for module in model.modules():
            weight: Any = module._parameters.get("weight")
            if type(weight).__name__ == "Int8Params":
                self._eight.append(module)
                if weight.CB is not None:
                    module.init_8bit_state()  # type: ignore[operator]
                state: Any = module.state
                kind: Any = type(state)
                del state.CB
                state.__class__, state._layer = _following(kind), weakref.ref(module)
        for param, _ in self._kinds:
            param.__class__ = nn.Parameter
        if device is not None and self._kinds:
            put_scales(model, lambda value: value.to(device))

    def release(self) -> None:
        """Give back classes, and to layers of 8 bits what they had before their first forward."""
        if self._device is not None and self._kinds:
            put_scales(self._model, Tensor.cpu)
        for module in self._eight:
            state, weight = module.state, module.weight
            del state._layer
            state.__class__ = type(state).__mro__[1]
            weight.CB = weight.data
            weight.SCB = state.SCB
            state.CB = state.SCB = None
        for param, kind in self._kinds:
            param.__class__ = kind


@contextmanager
def counted_with(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, quantised weights are plain parameters, and their scales what ``convert`` makes of them."""
    adopted, originals = Adopted(model), list(scales(model))
    put_scales(model, convert)
    try:
        yield
    finally:
        for holder, name, value in originals:
            setattr(holder, name, value)
        adopted.release()


@cache
def _following(base: Any) -> type:
    """``base``, the state of an 8-bit layer, whose ``CB`` is the layer's weight, wherever that is."""

    def follow(state: Any) -> Any:
        return state._layer().weight

    return type(f"Following{base.__name__}", (base,), {"CB": property(follow)})
