"""Copies of the model exchange otherwise than by one ring: in phases, or in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from deepstow.strategies.engine.ranks.two_level import TwoLevel as Exchange
from deepstow.strategies.plugins import two_level
from deepstow.strategies.plugins.compressed import Compressed
from deepstow.trainer.execution.base import Around, Execution


class TwoLevel(Around):
    """Gradients are averaged inside machines first, and then across."""

    def __init__(self, inner: Execution, exchange: Exchange) -> None:
        super().__init__(inner)
        self._exchange = exchange

    def wrapped(self, model: Any) -> None:
        two_level.hook_of(self._exchange).hang_on(model)


class Exchanging(Around):
    """Gradients, or differences of weights, are sent in fewer bytes."""

    def __init__(self, inner: Execution, compressed: Compressed) -> None:
        super().__init__(inner)
        self._compressed = compressed
        self._followed: Any = None

    @property
    def wraps(self) -> bool:  # type: ignore[override]
        """Ranks that train alone for some steps are not wrapped."""
        return self.inner.wraps and not self._compressed.compression.local_steps

    def wrapped(self, model: Any) -> None:
        self._compressed.hang_on(model)

    def follow(self, optimizer: Any, model: Any) -> None:
        self.inner.follow(optimizer, model)
        if self._followed is not optimizer:
            self._followed = optimizer
            self._compressed.follow(optimizer, model)

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, accelerator: Any, clip: Any) -> Any:
        norm = self.inner.clip(parameters, max_norm, norm_type, accelerator, clip)
        # The engine clips by its own, which stays as it is.
        return self._compressed.norm_of_all(norm.clone() if self.stowed is not None else norm)

    def finish(self) -> str:
        return self._compressed.finish()

    def evaluating(self) -> AbstractContextManager[None]:
        return self._compressed.outer_weights()

    def save(self, folder: Path, rank: int) -> None:
        self._compressed.save(folder, rank)

    def load(self, folder: Path, rank: int) -> str:
        return self._compressed.load(folder, rank)

    def resumed(self) -> None:
        self._compressed.resumed()
