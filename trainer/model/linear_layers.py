"""List the linear layers of a model from one fake forward, as they are called there: a head may compute the last tokens
only, layers behind frozen ones pass nothing back, and some layers are never called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from strategies.core.linears import ELEMENT_BYTES, Linear, Shape
from trainer.model.params import EMBEDDING, HEAD

if TYPE_CHECKING:
    import torch
    from torch import nn


@contextmanager
def listed(
    model: nn.Module,
    blocks: Collection[str],
    compute: torch.dtype | None,
    like: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Linear]]:
    """A dict that has, after a forward inside the context, the linear layers that were called, by dotted path.

    Args:
        blocks: dotted paths; ``like``: blocks that do not run, and those that stand for them.
        compute: the dtype of autocast; None means that every weight is computed in its own dtype.
    """
    import torch

    from strategies.engine.forward.routed_linear import storage_of

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
