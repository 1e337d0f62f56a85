"""Count forward and backward of a model on the meta device, of blocks that are alike three, and of others all.

What the three have in common is compared (``stubs.py``). Where they differ, or where the model needs more of a block
than a stub has, all blocks run. Only blocks that run get fake tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from strategies.core.linears import Linear
from strategies.engine.forward.blocks import find_blocks
from trainer.model import temporaries
from trainer.model.counting import Counter
from trainer.model.linear_layers import listed
from trainer.model.stubs import Alike, find_alike, standing_for, stubs

logger = logging.getLogger(__name__)
Found = tuple[Counter, dict[str, Linear], temporaries.Counted]


def count(model: Any, call: Callable[[], Any], compute: torch.dtype | None) -> Found:
    """What ``call``, one forward of ``model``, saves and computes, its linear layers, and what else is there meanwhile.

    Args:
        model: on the meta device, inside of ``fake_tensors()``.
        compute: the dtype of autocast; None: every weight is computed in its own dtype.
    """
    alike = find_alike(model)
    if alike:
        try:
            return _count(model, call, compute, alike)
        except Exception as error:  # its forward may ask anything of a block that a stub has not
            logger.info("the model is counted on all blocks: %s", error)
    return _count(model, call, compute, ())


def _count(model: Any, call: Callable[[], Any], compute: torch.dtype | None, alike: Collection[Alike]) -> Found:
    """Count, with stubs for those ``alike``.

    Raises:
        ValueError: they were not alike.
    """
    like = standing_for(alike)
    _materialise(model, like)
    counter = Counter(model, like=like)
    listing = listed(model, find_blocks(model), compute, recomputes=False, like=like)
    with stubs(model, like, lambda name: counter.outputs[like[name]]), counter, listing as linears:
        call()

    def layers(block: str) -> list[Linear]:
        return [replace(layer, unit="") for layer in linears.values() if layer.unit == block]

    for each in alike:
        if layers(each.second) != layers(each.last) or not counter.same(each.second, each.last):
            raise ValueError(f"{each.second} and {each.last} are not alike")
    counted = temporaries.count(model, dict(model.named_parameters()), call, counter, on_all=not alike)
    return counter, linears, counted


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
