"""Which parameters are read outside of the modules that own them, found in one forward.

The engine brings weights when the module that owns them is called (outside of blocks), or the block around it. A loss
that multiplies by ``lm_head.weight`` itself, an adapter on an embedding, a ``ParameterList`` read them at another time.
What is seen doing so is not let travel; the engine settles it where it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strategies.engine.blocks import find_blocks

if TYPE_CHECKING:
    from torch import Tensor, nn


class Readers:
    """Watches one forward.

    Args:
        weights: the tensors that stand for the parameters in it, by name; the model's own, where none are given.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        self._blocks = set(find_blocks(model))
        self._running: Counter[str] = Counter()
        self._owners: dict[int, set[str]] = {}  # of a storage: where it may be read
        self._names: dict[int, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            storage = (weights or {}).get(name, param).untyped_storage()._cdata
            self._names.setdefault(storage, name)
            self._owners.setdefault(storage, set()).add(self._owner(name))
        self.elsewhere: set[str] = set()

    def _owner(self, param: str) -> str:
        parts = param.split(".")[:-1]
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((path for path in paths if path in self._blocks), ".".join(parts))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the forward runs."""

        def count(name: str, by: int) -> Any:
            return lambda *_: self._running.update({name: by})

        handles: list[Any] = []
        for name in {name for names in self._owners.values() for name in names}:
            module = self._model.get_submodule(name)
            handles += [
                module.register_forward_pre_hook(count(name, 1)),
                module.register_forward_hook(count(name, -1), always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def look(self, inputs: Iterable[Tensor]) -> None:
        """An operator reads these."""
        for tensor in inputs:
            storage = tensor.untyped_storage()._cdata
            owners = self._owners.get(storage)
            if owners is not None and not any(self._running[name] for name in owners):
                self.elsewhere.add(self._names[storage])
