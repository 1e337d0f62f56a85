"""Dropout inside attention where ranks have other heads: another mask on each.

Problem. All ranks of one copy of the model draw the same numbers, since dropout on the hidden states must be the same
on each of them. Inside attention that would give head 0 and the first head of the next rank the same mask.

On entry a number is drawn from the common sequence, which is then put aside; attention draws from a sequence that
follows from this number and the rank. Afterwards the common sequence goes on. A recomputed forward starts from the same
state and draws the same masks.

Invariant. All ranks of a copy draw equally many common numbers, so that their sequences stay equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from strategies.core.grid import Grid
from strategies.engine.memory import accelerator

ATTENTION = "self_attn"


def apart(model: nn.Module, grid: Grid) -> int:
    """Let the attention of every block draw another mask on each rank of a copy; how many do. Without dropout none.

    Collective in that every rank has to call it; it needs the process group.
    """
    probability = getattr(getattr(model, "config", None), "attention_dropout", 0.0) or 0.0
    if grid.tensor == 1 or not probability:
        return 0
    place = _Place(grid.cell(torch.distributed.get_rank()).tensor, grid.tensor)
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ATTENTION]
    for module in found:
        kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        module.register_forward_pre_hook(_Enter(place, kept))
        module.register_forward_hook(_Leave(kept), always_call=True)
    return len(found)


class _Place:
    """This rank among those of its copy."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count


class _Enter:
    """Put the common sequence aside."""

    def __init__(self, place: _Place, kept: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self._place, self._kept = place, kept

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not module.training:
            return
        drawn = int(torch.randint(2**31, (1,)).item())
        kind = accelerator.kind()
        device = None if kind is None else torch.get_device_module(kind)
        self._kept.append((torch.get_rng_state(), None if device is None else device.get_rng_state()))
        torch.manual_seed(drawn * self._place.count + self._place.index)


class _Leave:
    """Go on with the common sequence."""

    def __init__(self, kept: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self._kept = kept

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._kept:
            return
        on_cpu, on_device = self._kept.pop()
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.get_device_module(str(accelerator.kind())).set_rng_state(on_device)
