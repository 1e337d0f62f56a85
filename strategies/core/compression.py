"""How ranks exchange in fewer bytes, as the config says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are exchanged in fewer bytes (``strategies/plugins/compressed.py``)."""

    method: Literal["none", "bf16", "fp16", "powersgd", "topk", "int8"]
    density: float  # the part of the elements that top-k sends
    rank: int  # of PowerSGD's factors
    start: int  # steps before that exchange all, where something is owed
    local_steps: int = 0  # after which ranks exchange what they have learned, in place of gradients; 0: gradients
    outer_lr: float = 0.7  # of that exchange's SGD
    outer_momentum: float = 0.9
    momentum: float = 0.0  # of each rank's own gradients, in place of the optimizer's, under top-k

    @property
    def owes(self) -> bool:
        """Whether ranks keep what they have not sent, and send it later."""
        return self.method not in ("none", "bf16", "fp16")

    @property
    def words(self) -> str:
        corrected = f", momentum {self.momentum:g}" if self.momentum else ""
        options = {"topk": f", density {self.density:g}{corrected}", "powersgd": f", rank {self.rank}"}
        summary = f"{'fp32' if self.method == 'none' else self.method}{options.get(self.method, '')}"
        if self.local_steps:
            outer = f"outer_lr {self.outer_lr:g}, outer_momentum {self.outer_momentum:g}"
            return f"{summary}, every {self.local_steps} steps ({outer})"
        return f"{summary}{f', from step {self.start + 1} on' if self.owes else ''}"
