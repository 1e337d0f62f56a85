"""Count forward and backward of a model: of blocks that are alike three, and of others all; and list linear layers.

What the three have in common is compared (``stubs.py``). Where they differ, or where the model needs more of a block
than a stub has, all blocks run. If backward fails even so, as with operators whose backward fake tensors lack, a
warning says that nothing temporary is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.facts import InChunks, Temporaries, Unit
from strategies.core.linears import ELEMENT_BYTES, Linear, Shape
from strategies.engine.forward import chunked_loss
from strategies.engine.forward.blocks import find_blocks
from strategies.engine.forward.routed_linear import storage_of
from trainer.model import temporaries
from trainer.model.counting import Counter
from trainer.model.params import EMBEDDING, HEAD
from trainer.model.stubs import Alike, find_alike, standing_for, stubs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Found:
    """What was counted: saved bytes and operators, linear layers, temporaries by unit, the head with its loss by
    chunks (None: it has another loss).
    """

    counter: Counter
    linears: dict[str, Linear]
    temporaries: dict[str, Temporaries] = field(default_factory=dict)
    in_chunks: InChunks | None = None

    def units(self) -> tuple[Unit, ...]:
        """The units of the model with all of it."""
        return self.counter.units(self.temporaries, self.in_chunks)


def count(
    model: Any,
    call: Callable[[], Any],
    compute: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Found:
    """Count ``call``, one forward of ``model``, and its backward, inside of ``fake_tensors()``.

    Args:
        compute: the dtype of autocast; None: every weight is computed in its own dtype.
        weights: fake tensors that ``call`` computes with, by name; None: those of the model, which is on the meta
            device and gets some.
    """
    alike = find_alike(model)
    if alike:
        try:
            return _count(model, call, compute, weights, alike)
        except Exception as error:  # its forward may ask anything of a block that a stub has not
            logger.info("the model is counted on all blocks: %s", error)
    return _count(model, call, compute, weights, ())


def _count(
    model: Any,
    call: Callable[[], Any],
    compute: torch.dtype | None,
    weights: Mapping[str, Tensor] | None,
    alike: Collection[Alike],
) -> Found:
    """Count, with stubs for those ``alike``.

    Raises:
        ValueError: they were not alike.
    """
    like = standing_for(alike)
    if weights is None:
        _materialise(model, like)
    counter, blocks = Counter(model, weights, like), find_blocks(model)
    with (
        stubs(model, like, lambda name: counter.outputs[like[name]]),
        counter,
        listed(model, blocks, compute, like) as linears,
    ):
        call()

    def layers(block: str) -> list[Linear]:
        return [replace(layer, unit="") for layer in linears.values() if layer.unit == block]

    for each in alike:
        if layers(each.second) != layers(each.last) or not counter.same(each.second, each.last):
            raise ValueError(f"{each.second} and {each.last} are not alike")
    found = Found(counter, linears)
    params = weights or dict(model.named_parameters())
    try:
        ran = temporaries.count(model, params, call, counter.saved, like, counter.outputs.__getitem__)
    except Exception as error:
        if alike:
            raise
        logger.warning("temporaries of backward are not counted: %s", error)
        return found
    found.temporaries = ran | {name: ran[other] for name, other in like.items() if other in ran}
    if HEAD in ran:
        found.in_chunks = _in_chunks(model, params, call, weights, counter.outputs)
    return found


def _in_chunks(
    model: Any,
    params: Mapping[str, Tensor],
    call: Callable[[], Any],
    weights: Mapping[str, Tensor] | None,
    outputs: Mapping[str, Any],
) -> InChunks | None:
    """The head with its loss by chunks, without any block; None if its loss is another one."""
    blocks = find_blocks(model)
    with chunked_loss.counting(model) as calls:
        counter = Counter(model, weights)
        try:
            with counter, stubs(model, blocks, outputs.__getitem__):
                call()
            if len(calls) != 1:
                return None
            ran = temporaries.count(model, params, call, counter.saved, blocks, outputs.__getitem__)
            return InChunks(calls[0], counter.saved.get(HEAD, 0), ran.get(HEAD))
        except Exception as error:
            logger.info("the loss by chunks is not counted: %s", error)
            return None


def _materialise(model: Any, absent: Collection[str]) -> None:
    """Give all modules fake tensors but those of ``absent`` blocks, and those that have some from a count before.

    Of those others may hold weak references, and torch would not replace them.
    """
    without = {module for name in absent for module in model.get_submodule(name).modules()}
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if module not in without and any(tensor.device.type == "meta" for tensor in own):
            module.to_empty(device="cpu", recurse=False)
    model.tie_weights()  # each name has got a tensor of its own


@contextmanager
def listed(
    model: nn.Module,
    blocks: Collection[str],
    compute: torch.dtype | None,
    like: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Linear]]:
    """A dict that has, after a forward inside the context, the linear layers that were called, by dotted path.

    They are described as they are called there: a head may compute the last tokens only, and layers behind frozen ones
    pass nothing back.

    Args:
        blocks: dotted paths; ``like``: blocks that do not run, and those that stand for them.
        compute: the dtype of autocast; None means that every weight is computed in its own dtype.
    """

    def see(calls: list[tuple[int, bool]], module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        # The first forward of a reentrant checkpoint runs without gradients.
        calls.append((x.numel() // max(1, x.shape[-1]), x.requires_grad or not torch.is_grad_enabled()))

    found: dict[str, Linear] = {}
    layers: dict[str, Any] = {path: module for path, module in model.named_modules() if storage_of(module) is not None}
    calls_of: dict[str, list[tuple[int, bool]]] = {path: [] for path in layers}
    with ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(see, calls_of[path]), with_kwargs=True))
        yield found
    outside = EMBEDDING
    for path, layer in layers.items():
        block = next((block for block in blocks if path.startswith(f"{block}.")), None)
        outside = HEAD if block is not None else outside
        calls = calls_of[path if block is None or block not in like else like[block] + path.removeprefix(block)]
        dtype = str(compute or layer.weight.dtype).removeprefix("torch.")
        if not calls or dtype not in ELEMENT_BYTES:
            continue
        stored: Any = storage_of(layer)
        inputs, outputs = reversed(layer.weight.shape) if stored == "out_in" else layer.weight.shape
        found[path] = Linear(
            name=path if block is None else path.removeprefix(f"{block}."),
            unit=block or outside,
            shape=Shape(max(rows for rows, _ in calls), inputs, outputs, stored, dtype),
            trains=layer.weight.requires_grad,
            passes_back=any(needs for _, needs in calls),
            casts=compute not in (None, layer.weight.dtype),
            calls=len(calls),
        )
