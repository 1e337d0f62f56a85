"""The plan against the run: what was predicted and what is there, once, after the second step.

By then every buffer exists and every kernel has had its workspace. Rows that can be measured exactly: the arenas of a
memory engine, what autograd saves in one forward. The process's peak holds everything, libraries included, and is
predicted with a round number for those.

What is saved is counted by torch's own hooks in the first micro-batch of step 2; blocks that ``strategies.recompute``
has changed show what they keep. It is not counted under Hugging Face's checkpointing, whose hooks are inside ours, and
under ZeRO stage 3, where gathered weights would count as saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from strategies.core.plan import Home, Plan
from strategies.core.render import human
from trainer import engine
from trainer.callbacks import device_peak_bytes, host_peak_bytes, write_line

if TYPE_CHECKING:
    from torch import Tensor, nn

STEP = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: bytes predicted and measured. ``error`` is relative to what was measured."""

    owner: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0

    def line(self, width: int) -> str:
        return (
            f"  {self.owner:<{width}}  {human(self.predicted_bytes):>10} predicted  "
            f"{human(self.measured_bytes):>10} measured  {100 * self.error:+6.1f} %"
        )


@contextmanager
def count_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of what autograd and recomputed blocks save inside, by address; each storage once, weights not counted."""
    import torch

    from strategies.runtime.recompute import checkpointed

    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            weights = {param.untyped_storage().data_ptr() for param in model.parameters()}  # some have just come
            storages[address] = 0 if address in weights else storage.nbytes()
        return tensor

    recomputed = [found for module in model.modules() if (found := checkpointed(module)) is not None]
    for block in recomputed:
        block.watch = pack
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield storages
    finally:
        for block in recomputed:
            block.watch = None


class Ledger(TrainerCallback):  # type: ignore[misc]
    """Prints predicted against measured after step 2 and adds it to ``plan.json``.

    Args:
        plan_file: written by ``trainer/build.py``; gets the key ``measured``.
        recomputes: Hugging Face's checkpointing is on.
    """

    def __init__(self, plan: Plan, plan_file: Path, *, recomputes: bool) -> None:
        self._plan, self._file = plan, plan_file
        self._countable = not recomputes and engine.stage(plan) != 3
        self._storages: dict[int, int] = {}

    @contextmanager
    def counting(self, model: nn.Module, step: int) -> Iterator[None]:
        """Count what autograd saves inside, if this is the forward to be counted."""
        if not self._countable or self._storages or step != STEP - 1 or not model.training:
            yield
            return
        with count_saved(model) as self._storages:
            yield

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step != STEP or not state.is_world_process_zero:
            return
        entries = list(self.entries())
        width = max(len(entry.owner) for entry in entries)
        write_line("plan against run, after step 2")
        for entry in entries:
            write_line(entry.line(width))
        written = json.loads(self._file.read_text())
        written["measured"] = [{**asdict(entry), "error": entry.error} for entry in entries]
        partial = self._file.with_suffix(".tmp")
        partial.write_text(json.dumps(written, indent=1))
        partial.rename(self._file)

    def entries(self) -> Iterator[Entry]:
        """All rows that can be measured on this machine."""
        plan = self._plan
        if self._storages:
            predicted = sum(plan.saved_bytes(unit.name) for unit in plan.facts.units)
            yield Entry("saved for backward", predicted, sum(self._storages.values()))
        on_device = device_peak_bytes()
        host = plan.peak(Home.HOST)
        if on_device is not None:
            yield Entry("device, peak", plan.peak(Home.DEVICE), on_device)
        else:
            host += plan.peak(Home.DEVICE)  # the device is this machine's memory
        yield Entry("process, peak", host, host_peak_bytes())
