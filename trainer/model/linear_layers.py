"""List the linear layers of a model from one fake forward.

Rows, calls and whether an input needs a gradient are observed where a layer is called, so a head that computes only the
last tokens, layers behind frozen ones, and layers that are never called are described correctly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strategies.core.linears import ELEMENT_BYTES, Linear, Shape
from trainer.model.params import EMBEDDING, HEAD

if TYPE_CHECKING:
    import torch
    from torch import nn


class LinearCounter:
    """Observes the calls of a model's linear layers."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[Any, str]] = {}  # modules and how their weights are stored, by dotted path
        self._calls: dict[str, list[tuple[int, bool]]] = {}  # rows, and whether the input needs a gradient

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Observe ``model`` inside the context."""
        import torch

        from strategies.engine.routed_linear import storage_of

        def before(name: str) -> Any:
            def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = args[0] if args else next(iter(kwargs.values()))
                # The first forward of a reentrant checkpoint runs without gradients.
                needs = x.requires_grad or not torch.is_grad_enabled()
                self._calls.setdefault(name, []).append((x.numel() // max(1, x.shape[-1]), needs))

            return see

        found = {name: (module, storage_of(module)) for name, module in model.named_modules()}
        self._layers = {name: (module, stored) for name, (module, stored) in found.items() if stored is not None}
        handles = [
            module.register_forward_pre_hook(before(name), with_kwargs=True)
            for name, (module, _) in self._layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def listed(self, blocks: Collection[str], compute: torch.dtype | None, *, recomputes: bool) -> tuple[Linear, ...]:
        """The layers that were called and compute in a floating-point format, in the order of registration.

        Args:
            blocks: dotted paths.
            compute: the dtype of autocast; None means that every weight is computed in its own dtype.
            recomputes: blocks run forward once more in backward.
        """
        found: list[Linear] = []
        outside = EMBEDDING
        for path, (module, stored) in self._layers.items():
            block = next((block for block in blocks if path.startswith(f"{block}.")), None)
            outside = HEAD if block is not None else outside
            dtype = str(compute or module.weight.dtype).removeprefix("torch.")
            if path not in self._calls or dtype not in ELEMENT_BYTES:
                continue
            rows, needs = zip(*self._calls[path], strict=True)
            inputs, outputs = reversed(module.weight.shape) if stored == "out_in" else module.weight.shape
            layer = Linear(
                name=path if block is None else path.removeprefix(f"{block}."),
                unit=block or outside,
                shape=Shape(max(rows), inputs, outputs, stored, dtype),  # type: ignore[arg-type]
                trains=module.weight.requires_grad,
                passes_back=any(needs),
                recomputed=recomputes and block is not None,
                casts=compute not in (None, module.weight.dtype),
                calls=len(needs),
            )
            found.append(layer)
        return tuple(found)
