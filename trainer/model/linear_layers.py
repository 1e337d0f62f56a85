"""The linear layers of a model, as ``strategies/linear.py`` wants to know them, counted in one fake forward.

Rows, calls and whether the input needs a gradient are seen where they happen, so a head that computes the last tokens
only, a layer behind frozen ones, and a layer that is never called are all as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.core.linears import ELEMENT_BYTES, Linear, Shape
from trainer.model.params import EMBEDDING, HEAD

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(slots=True)
class _Seen:
    rows: int
    passes_back: bool
    calls: int = 0


class LinearCounter:
    """Watches the linear layers of a model while it runs forward."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._modules: dict[str, Any] = {}

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Hooks ``model`` for the time of the context."""
        from strategies.engine.routed_linear import storage_of

        self._modules = {name: module for name, module in model.named_modules() if storage_of(module) is not None}
        handles = [
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str) -> Any:
        import torch

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            width = x.shape[-1] if x.dim() else 1
            # Where a block is checkpointed the old way, its first forward runs without gradients.
            needs = x.requires_grad or not torch.is_grad_enabled()
            seen = self._seen.setdefault(name, _Seen(x.numel() // max(1, width), needs))
            seen.calls += 1
            seen.rows, seen.passes_back = max(seen.rows, x.numel() // max(1, width)), seen.passes_back or needs

        return see

    def listed(self, blocks: Collection[str], compute: torch.dtype | None, *, recomputes: bool) -> tuple[Linear, ...]:
        """Every layer that was called and computes with floats, in order of registration.

        Args:
            blocks: dotted paths.
            compute: the dtype of autocast; None: every weight's own.
            recomputes: blocks run forward once more in backward.
        """
        found: list[Linear] = []
        outside = EMBEDDING
        for name, module in self._modules.items():
            unit = next((block for block in blocks if name.startswith(f"{block}.")), None)
            outside = HEAD if unit is not None else outside
            weight = module.weight
            dtype = str(compute or weight.dtype).removeprefix("torch.")
            if name not in self._seen or dtype not in ELEMENT_BYTES:
                continue
            seen = self._seen[name]
            found.append(
                Linear(
                    name=name if unit is None else name.removeprefix(f"{unit}."),
                    unit=unit or outside,
                    shape=_shape(module, seen.rows, dtype),
                    trains=weight.requires_grad,
                    passes_back=seen.passes_back,
                    recomputed=recomputes and unit is not None,
                    casts=compute not in (None, weight.dtype),
                    calls=seen.calls,
                )
            )
        return tuple(found)


def _shape(module: Any, rows: int, dtype: str) -> Shape:
    from strategies.engine.routed_linear import storage_of

    first, second = module.weight.shape
    if storage_of(module) == "out_in":
        return Shape(rows, second, first, "out_in", dtype)
    return Shape(rows, first, second, "in_out", dtype)
