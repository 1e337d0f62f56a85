"""Count forward and backward of a model: of blocks that are alike three, and of others all.

What the three have in common is compared (``stubs.py``). Where they differ, or where the model needs more of a block
than a stub has, all blocks run. If backward fails even so, as with operators whose backward fake tensors lack, a
warning says that nothing temporary is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from strategies.core.facts import InChunks
from strategies.engine.forward import chunked_loss
from trainer.model import temporaries
from trainer.model.counting import Counter
from trainer.model.params import HEAD
from trainer.model.stubs import find_alike

logger = logging.getLogger(__name__)
Call = Callable[[], Any]  # one forward


def count(model: nn.Module, call: Call, weights: Mapping[str, Tensor] | None = None) -> Counter:
    """Count ``call``, one forward of ``model``, and its backward, inside of ``fake_tensors()``. ``weights`` are the
    fake tensors that it computes with, by name, if they are not the model's own.
    """
    alike = find_alike(model)
    if alike:
        try:
            return _count(model, call, weights, alike)
        except Exception as error:  # its forward may ask anything of a block that a stub has not
            logger.info("the model is counted on all blocks: %s", error)
    return _count(model, call, weights, ())


def _count(model: nn.Module, call: Call, weights: Mapping[str, Tensor] | None, alike: Sequence[list[str]]) -> Counter:
    """Count, with stubs for most of those ``alike``. Raise ValueError if they were not alike."""
    found = Counter(model, weights, {name: names[1] for names in alike for name in names[2:-1]})
    with found:
        call()
    for _, second, *_, last in alike:
        if not found.same(second, last):
            raise ValueError(f"{second} and {last} are not alike")
    try:
        found.temporaries = temporaries.count(found, call)
    except Exception as error:
        if alike:
            raise
        logger.warning("temporaries of backward are not counted: %s", error)
        return found
    if HEAD in found.temporaries:
        found.in_chunks = _in_chunks(found, call)
    return found


def _in_chunks(found: Counter, call: Call) -> InChunks | None:
    """The head with its loss by chunks, without any block; None if its loss is another one."""
    with chunked_loss.counting(found.model) as calls:
        alone = Counter(found.model, found.weights, {name: name for name in found.blocks}, found.outputs)
        try:
            with alone:
                call()
            if len(calls) != 1:
                return None
            return InChunks(calls[0], alone.saved.get(HEAD, 0), temporaries.count(alone, call).get(HEAD))
        except Exception as error:
            logger.info("the loss by chunks is not counted: %s", error)
            return None
