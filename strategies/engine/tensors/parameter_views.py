"""The parameters of one bucket as the model sees them: views of the home, or absent.

Invariant. A parameter is *shown* (present or visiting, its memory a view of the home) only while COMPUTE may read the
home: the newest weights have arrived there, and no other bucket may take the address. Resident weights are shown until
their next update begins, others while a scope that uses them is open. A parameter that is not shown is an
``AbsentParameter``; once the home may belong to another bucket, its memory is one NaN expanded to its shape.

[Note: versions] Torch counts the writes to a tensor, stores the count with every tensor that it saves for backward, and
raises if the count has changed when backward reads the tensor. Parameters that are not shown have a count that no saved
tensor has. So torch itself refuses a backward node that reads a weight while its home may hold another bucket;
``guard.py`` makes sure that the weight is there instead.

[Note: unseen writes] Of each parameter its count of writes and its address are known. Before the engine changes either,
and when a step begins, both are compared. If a write was made where the home is the only memory of the weight, it is
the newest weight, as in plain training. Otherwise it is refused by name: a copy or a master elsewhere is older.

Only this file writes the fields of ``ParameterViews``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from deepstow.strategies.engine.tensors.parameters import (
    RAW_DATA,
    WRITE,
    AbsentParameter,
    PresentParameter,
    StowedParameter,
    VisitingParameter,
    put,
    set_counts,
)

AWAY = 2**31 - 1  # see [Note: versions]; larger than any number of updates


class ParameterViews:
    """Parameters of one bucket by their index in it; ``homes``: each one's part of the home, in its shape; ``fused``:
    those of modules with a fused kernel, which they use only if all parameters are plain tensors. ``sole``: the home is
    the only memory of a weight.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        params: list[nn.Parameter],
        homes: list[Tensor],
        nan: Tensor,
        fused: frozenset[int],
        *,
        resident: bool,
        sole: bool,
    ) -> None:
        self.names = names
        self.params = params
        self.homes = homes
        self.nan = nan
        self.fused = fused
        self.resident = resident
        self.sole = sole
        self.own = list(range(len(params)))  # those that are not on loan
        self.versions = [param._version for param in params]  # of each: its updates, and all other writes to it
        self.counts = list(self.versions)  # what torch's count of writes was set to; see [Note: versions]
        self.at: list[int | None] = [None] * len(params)  # of each: its address, once the engine has set it
        self.bound = False  # the parameters' memory is the home
        self.shown = False  # see the invariant

    @property
    def kind(self) -> type[StowedParameter]:
        return PresentParameter if self.resident else VisitingParameter

    def shows(self, index: int) -> bool:
        return self.shown and index in self.own

    def absent(self, index: int) -> Tensor:
        """NaN in the shape of this parameter, without memory of that size."""
        return self.nan.expand(self.homes[index].shape)

    def show(self) -> None:
        """COMPUTE may read the home, until ``make_absent`` or ``unbind``."""
        if self.shown:
            return
        self.find_writes()
        for index in self.own:
            param = self.params[index]
            param.__class__ = PresentParameter
            if not self.bound:
                RAW_DATA.__set__(param, self.homes[index])
                self.at[index] = self.homes[index].data_ptr()
            param.__class__ = self.kind
        self.bound = self.shown = True
        self._set_counts(self.own, shown=self.shown)

    def show_for_fused_kernels(self) -> None:
        """In a forward without gradients, so that modules choose the same fused kernels as in plain torch."""
        for index in self.fused.intersection(self.own) if self.shown else ():
            self.params[index].__class__ = PresentParameter

    def make_absent(self) -> None:
        """No open scope uses the bucket, so that another may take its address."""
        if not self.shown:
            return
        self.find_writes()
        for index in self.own:
            self.params[index].__class__ = AbsentParameter
        self.shown = False
        self._set_counts(self.own, shown=self.shown)

    def unbind(self) -> None:
        """The home is no longer this bucket's, or is about to be overwritten."""
        self.find_writes()
        self.bound = self.shown = False
        for index in self.own:
            self.restore(index)

    def restore(self, index: int) -> None:
        """Give one parameter the class, memory and count that the bucket's state asks for."""
        param = self.params[index]
        param.__class__ = PresentParameter  # whose attributes are set without a detour
        self.versions[index] += param._version - self.counts[index]  # writes that were allowed
        memory = self.homes[index] if self.bound else self.absent(index)
        put(param, memory)
        self.at[index] = memory.data_ptr()
        self._set_counts([index], shown=self.shown)
        param.__class__ = self.kind if self.shown else AbsentParameter

    def lend(self, index: int, value: Tensor, kind: type[nn.Parameter]) -> None:
        """Make one parameter a ``kind`` with memory of its own, ``value``."""
        self.own = [other for other in self.own if other != index]
        param = self.params[index]
        param.__class__ = PresentParameter
        put(param, value)
        self._set_counts([index], shown=True)  # the value is the same until it is written to
        param.__class__ = kind

    def take_back(self, index: int) -> None:
        """End the loan of one parameter, whose weight has been copied to its place."""
        self.own = sorted({*self.own, index})
        self.restore(index)

    def begin_update(self, indices: Iterable[int]) -> None:
        """An update of these begins: torch refuses graphs that saved the old values."""
        self.find_writes()
        for index in indices:
            self.versions[index] += 1
        self._set_counts(self.own, shown=self.shown)

    def _set_counts(self, indices: Sequence[int], *, shown: bool) -> None:
        """Set torch's counts of writes; see [Note: versions]."""
        for index in indices:
            self.counts[index] = self.versions[index] if shown else AWAY
        set_counts(tuple(self.params[index] for index in indices), tuple(self.counts[index] for index in indices))

    def find_writes(self) -> None:
        """Keep what others have written, or raise RuntimeError; see [Note: unseen writes]. Many times per step."""
        with torch._C.DisableTorchFunctionSubclass():
            for index in self.own:
                param, at = self.params[index], self.at[index]
                if param._version == self.counts[index] and (at is None or param.data_ptr() == at):
                    continue
                if at is None or param.data_ptr() != at:
                    raise RuntimeError(f"{self.names[index]} was given other memory; {WRITE}")
                if not (self.sole and self.shown):
                    raise RuntimeError(f"{self.names[index]} was written to in place; {WRITE}")
                self.versions[index] += param._version - self.counts[index]
                self.counts[index] = param._version
