"""Dropout inside attention where ranks have other heads: another mask on each.

Problem. All ranks of one copy of the model draw the same numbers, since dropout on the hidden states must be the same
on each of them. Inside attention that would give head 0 and the first head of the next rank the same mask.

On entry a number is drawn from the common sequence, which is then put aside; attention draws from a sequence that
follows from this number and the rank. Afterwards the common sequence goes on. A recomputed forward starts from the same
state and draws the same masks.

Invariant. All ranks of a copy draw equally many common numbers, so that their sequences stay equal.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from strategies.core.grid import Grid
from strategies.engine.memory import accelerator

ATTENTION = "self_attn"


def apart(model: nn.Module, grid: Grid) -> int:
    """Let the attention of every block draw another mask on each rank of a copy; how many do. Without dropout none."""
    probability = getattr(getattr(model, "config", None), "attention_dropout", 0.0) or 0.0
    if grid.tensor == 1 or not probability:
        return 0
    place = grid.cell(torch.distributed.get_rank()).tensor
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ATTENTION]
    for module in found:
        _draw_apart(module, place, grid.tensor)
    return len(found)


def _draw_apart(module: nn.Module, place: int, ranks: int) -> None:
    """Give ``module`` a sequence of its own on each of ``ranks``, of which this one is at ``place``."""
    device, aside = accelerator.current(), ExitStack()

    def enter(module: nn.Module, args: Any) -> None:
        if module.training:
            seed = int(torch.randint(2**31, (1,)).item()) * ranks + place
            devices, kind = ([], "cpu") if device is None else ([device], device.type)
            aside.enter_context(torch.random.fork_rng(devices, device_type=kind))
            torch.manual_seed(seed)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: aside.close(), always_call=True)
