"""Who lends parameters, and takes them back with what was written to them; see ``tensors/loans.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.tensors.loans import LentParameter


class Access(Protocol):
    """What lending needs of ``StateAccess``."""

    def settle(self, param: nn.Parameter) -> tuple[BucketState, int]: ...

    def is_as_lent(self, param: nn.Parameter) -> bool: ...

    def set_weight(self, param: nn.Parameter, value: Tensor) -> None: ...

    def was_used(self, bucket: BucketState) -> None: ...


class Loans:
    """The parameters on loan, with their buckets."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.out: dict[nn.Parameter, tuple[BucketState, int]] = {}

    @torch.no_grad()
    def lend(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Lend those of ``params`` that are not on loan until ``give_back``, and return them."""
        chosen = [param for param in dict.fromkeys(params) if param not in self.out]
        places = [self._access.settle(param) for param in chosen]  # all first: settling one bucket may hide another
        values = [param._keeper.value_to_lend() for param in chosen]  # type: ignore[attr-defined]
        for param, (bucket, index), value in zip(chosen, places, values, strict=True):
            bucket.views.lend(index, value, LentParameter)
            self.out[param] = bucket, index
        return chosen

    def keep(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Make the values of ``params``, by default of all on loan, their weights."""
        for param in tuple(self.out) if params is None else params:
            if not self._access.is_as_lent(param):
                self._access.set_weight(param, param.data)

    def give_back(self, params: Sequence[nn.Parameter]) -> None:
        """End the loan of ``params`` and keep what was written to them."""
        try:
            self.keep(params)
        finally:
            for param in params:
                bucket, index = self.out.pop(param)
                bucket.views.take_back(index)
                self._access.was_used(bucket)
