"""Parameters on loan: plain parameters for a while, with memory of their own, whatever becomes of their buckets.

Two need that: ``optimizer.present``, where people read and write weights as they would elsewhere, and modules that
change what is saved of them, which have to look at their weights (``state_dict.py``).

A parameter on loan shows a copy on the device, or its home if it stays. The engine leaves it alone until it is given
back (``bucket_state.py``): forward uses what it shows, whatever was written to it, ``state_dict`` shows it,
``load_state_dict`` writes to it. When it is given back, what differs from the weight is the new weight.

Invariant. While a parameter is on loan its weight changes in what it shows only. So no update may begin: ``step``
is refused, and so is a backward that updates.

Not seen: what is written after the loan to tensors that share a copy's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strategies.engine.tensors.nested import same_bits
from strategies.engine.tensors.parameters import RAW_DATA, StowedParameter

if TYPE_CHECKING:
    from strategies.engine.bucket_state import BucketState
    from strategies.engine.state_dict import Surface


class LentParameter(StowedParameter):
    """On loan: a plain parameter to everybody; its gradient is where it was."""

    @property
    def data(self) -> Tensor:
        """Its value, to read and to write."""
        value: Tensor = RAW_DATA.__get__(self)
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"{self._keeper.name}: {value.dtype} {list(value.shape)} on {value.device} assigned to a parameter "
                f"that is {self.dtype} {list(self.shape)} on {self.device}; the memory of a stowed model is planned"
            )
        RAW_DATA.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.data.clone(), self.requires_grad)


class Loans:
    """What is on loan."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._out: dict[nn.Parameter, tuple[BucketState, int]] = {}

    @torch.no_grad()
    def lend(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Let ``params`` be plain ones until ``give_back``; those that were not already."""
        chosen = [param for param in dict.fromkeys(params) if param not in self._out]
        places = [self._surface.settled(param) for param in chosen]  # all first: settling one bucket may hide another
        values = [self._surface.shown_to_others(*place) for place in places]
        for param, (bucket, index), value in zip(chosen, places, values, strict=True):
            bucket.views.lend(index, value, LentParameter)
            self._out[param] = bucket, index
        return chosen

    def keep(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """What was written to ``params``, by default to all that are on loan, is their weight from now on."""
        for param in tuple(self._out) if params is None else params:
            bucket, index = self._surface.settled(param)
            known = bucket.part(bucket.newest if bucket.master is None else bucket.master, index).to(param.dtype)
            if not same_bits(param.data.cpu(), known.cpu()):
                self._surface.adopt(param, param.data)

    def give_back(self, params: Sequence[nn.Parameter]) -> None:
        """The engine's again. What was written to them is kept."""
        try:
            self.keep(params)
        finally:
            for param in params:
                bucket, index = self._out.pop(param)
                bucket.views.take_back(index)
                self._surface.used(bucket)

    def refuse(self, what: str) -> None:
        """Do nothing while nothing is on loan.

        Raises:
            RuntimeError: something is, and ``what`` changes weights.
        """
        if self._out:
            raise RuntimeError(f"{what} inside of `with optimizer.present(...)`: leave the block before")
