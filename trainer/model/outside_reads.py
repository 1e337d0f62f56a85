"""Find the parameters that are read outside of the modules that own them, in one forward.

The engine brings weights when the module that owns them is called, or the block around that module. Some are read at
other times: by a loss that multiplies by ``lm_head.weight`` itself, by an adapter on an embedding, from a
``ParameterList``. The planner keeps such parameters on the device, and the engine copes with them where it must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from trainer.model.params import EMBEDDING, HEAD, units_by_name

if TYPE_CHECKING:
    from torch import Tensor, nn


class OutsideReads:
    """Watches one forward.

    Args:
        weights: tensors that replace the parameters of these names in the forward.

    Attributes:
        found: names of the parameters that were read outside of their modules.
        computing: modules that computed with a parameter of theirs, and did not look rows up only; None: nothing ran.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        self.found: set[str] = set()
        self.computing: set[str] | None = None
        self._model = model
        self._running: Counter[str] = Counter()
        self._owners: dict[int, set[str]] = {}  # the modules in which a storage may be read
        self._names: dict[int, str] = {}
        units = units_by_name(model)
        for name, param in model.named_parameters(remove_duplicate=False):
            storage = (weights or {}).get(name, param).untyped_storage()._cdata
            self._names.setdefault(storage, name)
            owner = name.rpartition(".")[0] if units[name] in (EMBEDDING, HEAD) else units[name]
            self._owners.setdefault(storage, set()).add(owner)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager around the forward."""

        def count(name: str, by: int) -> Any:
            return lambda *_: self._running.update({name: by})

        self.computing = set()
        with ExitStack() as hooks:
            for name in {name for names in self._owners.values() for name in names}:
                module = self._model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(count(name, 1)).remove)
                hooks.callback(module.register_forward_hook(count(name, -1), always_call=True).remove)
            yield

    def look(self, inputs: Iterable[Tensor], *, looks_up: bool = False) -> None:
        """Check the tensors that an operator reads, which may look rows up in them and do nothing else."""
        for tensor in inputs:
            storage = tensor.untyped_storage()._cdata
            owners = self._owners.get(storage)
            if owners is None:
                continue
            running = [name for name in owners if self._running[name]]
            if not running:
                self.found.add(self._names[storage])
            elif not looks_up and self.computing is not None:
                self.computing.update(running)
