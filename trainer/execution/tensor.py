"""Ranks divide each layer of the model (AutoTP): around ZeRO, or around the memory engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from deepstow.strategies.parallel import tensor_engine, tensor_shards
from deepstow.strategies.plugins import exchanged
from deepstow.trainer.execution.base import Around, Place


class TensorParallel(Around):
    """This rank has a slice of each layer."""

    def among_ranks(self, model: Any) -> dict[str, Any]:
        return tensor_engine.among_ranks(model, self.grid)

    def as_trained(self, model: Any) -> AbstractContextManager[None] | None:
        exchange = exchanged.exchange_of(model)
        return None if exchange is None else exchange.evaluating()

    def gathered(
        self, model: Any, *, keep: bool, place: Place | None = None, base: bool = True
    ) -> dict[str, Tensor] | None:
        state = self.inner.gathered(model, keep=keep, place=place, base=base)
        return tensor_shards.state_dict(model, keep=keep, place=place) if state is None else state

    def holder(self, trainer: Any) -> Any:
        if self.stowed is None:
            return self.inner.holder(trainer)
        writes = self.grid.cell(trainer.args.process_index).replica == 0
        return tensor_engine.EnginesParts(self.stowed, writes=writes)
