"""List the linear layers of a model from one fake forward.

Rows, calls and whether an input needs a gradient are observed where a layer is called, so a head that computes only the
last tokens, layers behind frozen ones, and layers that are never called are described correctly.
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
    *,
    recomputes: bool,
    like: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Linear]]:
    """A dict that has, after a forward inside the context, the linear layers of ``model`` by dotted path.

    Those are in it that were called and compute in a floating-point format, in the order of registration.

    Args:
        blocks: dotted paths.
        like: blocks that do not run, and those that stand for them.
        compute: the dtype of autocast; None means that every weight is computed in its own dtype.
        recomputes: blocks run forward once more in backward.
    """
    import torch

    from strategies.engine.forward.routed_linear import storage_of

    def see(calls: list[tuple[int, bool]], module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        # The first forward of a reentrant checkpoint runs without gradients.
        calls.append((x.numel() // max(1, x.shape[-1]), x.requires_grad or not torch.is_grad_enabled()))

    layers: dict[str, Linear] = {}
    watched: list[tuple[str, Any, Any, list[tuple[int, bool]]]] = []
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if (stored := storage_of(module)) is not None:
                watched.append((path, module, stored, []))
                hook = module.register_forward_pre_hook(partial(see, watched[-1][-1]), with_kwargs=True)
                hooks.enter_context(hook)
        yield layers
    calls_of = {path: calls for path, _, _, calls in watched}
    outside = EMBEDDING
    for path, module, stored, calls in watched:
        block = next((block for block in blocks if path.startswith(f"{block}.")), None)
        outside = HEAD if block is not None else outside
        if block is not None and block in like:
            calls = calls_of[like[block] + path.removeprefix(block)]
        dtype = str(compute or module.weight.dtype).removeprefix("torch.")
        if calls and dtype in ELEMENT_BYTES:
            inputs, outputs = reversed(module.weight.shape) if stored == "out_in" else module.weight.shape
            layers[path] = Linear(
                name=path if block is None else path.removeprefix(f"{block}."),
                unit=block or outside,
                shape=Shape(max(rows for rows, _ in calls), inputs, outputs, stored, dtype),
                trains=module.weight.requires_grad,
                passes_back=any(needs for _, needs in calls),
                recomputed=recomputes and block is not None,
                casts=compute not in (None, module.weight.dtype),
                calls=len(calls),
            )
