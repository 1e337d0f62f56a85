"""The plan against the run: predicted and measured bytes, compared after the second step, and seconds after a few more.

After two steps every buffer exists and every kernel has had its workspace. Three counts of bytes can be measured
exactly: the arenas of the memory engine, what autograd saves in one forward, and what crosses the link in one step.
Saved bytes are predicted for micro-batches of full length with a mask. Shorter ones save less, on the device and over
the link; one without a mask (full rows of one document each) saves less in attention, and is compared with a count of
its own, in units that keep everything. For the libraries in the process's peak the prediction has a round number.

Torch's hooks count what is saved in the first micro-batch of step 1. Blocks that ``strategies.recompute`` has changed
report what they keep. Hugging Face's checkpointing, whose hooks are inside ours, is not counted, nor is ZeRO stage 3,
where gathered weights would count as saved.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from strategies.backends import deepspeed
from strategies.core.commit import replace_file
from strategies.core.facts import UnitTimes
from strategies.core.layout import mapped_bytes
from strategies.core.plan import Home, Plan
from strategies.core.sizes import human
from strategies.engine import stowed_by
from strategies.engine.forward.blocks import find_blocks
from strategies.engine.forward.checkpointing import checkpointed, room_of
from strategies.planner.step_cost import empty, plan_cost, traffic, unit_seconds
from strategies.planner.weight_schedule import ASSUMED
from strategies.report.table import table
from trainer.errors import write_line
from trainer.machine import block_timing
from trainer.machine.block_timing import UnitClock, median_of, without_again
from trainer.run.callbacks import device_peak_bytes, host_peak_bytes

COUNTED, STEP = 1, 2  # steps: what is saved is counted in the first, all is compared after the second
FIRST, LAST = 2, 8  # that are timed
HEADER = ("", "predicted", "measured", "error")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A predicted and a measured number. ``error`` is relative to the measured one."""

    owner: str
    predicted: float
    measured: float
    unit: Literal["bytes", "seconds"] = "bytes"

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else 0.0

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        numbers = (self.predicted, self.measured)
        shown = (human(int(number)) if self.unit == "bytes" else f"{number:.3g} s" for number in numbers)
        return (self.owner, *shown, f"{100 * self.error:+.1f} %")


@contextmanager
def count_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield by address the bytes that autograd and recomputed blocks save; each storage once, without weights."""
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # a block's first forward shows what it will keep and does not keep it yet

    def show(tensor: Tensor) -> None:
        alive.append(tensor)
        pack(tensor)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            weights = {param.untyped_storage().data_ptr() for param in model.parameters()}  # some have just come
            storages[address] = 0 if address in weights else storage.nbytes()
        return tensor

    recomputed = [found for module in model.modules() if (found := checkpointed(module)) is not None]
    for block in recomputed:
        block.watch = show
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield storages
    finally:
        alive.clear()
        for block in recomputed:
            block.watch = None


class TimedSteps:
    """Seconds of forward and backward of ``steps``, as blocks are timed, and of these steps, whole.

    The median counts: while memory is touched for the first time and kernels choose their ways, a step takes up to a
    third longer. A shorter run is timed until its end. On an accelerator each border of a timed step waits for it.
    """

    def __init__(self, plan: Plan, steps: range) -> None:
        self._plan, self._steps = plan, steps
        self._clock: UnitClock | None = None
        self._began_s = 0.0
        self._seconds: dict[int, float] = {}
        self._units: list[UnitTimes] = []

    def begin(self, step: int) -> None:
        if step in self._steps:
            self._clock, self._began_s = None, self._now()

    @contextmanager
    def forward(self, model: nn.Module, step: int) -> Iterator[None]:
        """Around each forward of ``step``; blocks are timed in its first micro-batch."""
        if step not in self._steps or self._clock is not None or not (blocks := find_blocks(model)):
            yield
            return
        self._clock = UnitClock(blocks, next(model.parameters()).device)
        with self._clock.forward():
            yield

    def end(self, step: int) -> None:
        if step in self._steps and step not in self._seconds:
            self._seconds[step] = self._now() - self._began_s
            if self._clock is not None and (found := self._clock.seconds()) is not None:
                self._units.append(found)

    @property
    def name(self) -> str:
        """What has been timed, for people: "steps 2 to 8"; empty if nothing was."""
        if not self._seconds:
            return ""
        first, last = min(self._seconds), max(self._seconds)
        return f"steps {first} to {last}" if last > first else f"step {first}"

    @property
    def step_seconds(self) -> float:
        """The median of the timed steps."""
        return statistics.median(self._seconds.values())

    def unit_times(self) -> UnitTimes | None:
        """The median of each unit's times, without recomputation; None if no step had all the marks that are needed."""
        if not self._units:
            return None
        found = without_again(median_of(self._units), self._plan.facts_as_kept())
        return replace(found, origin=f"measured in {self.name} of a run")

    def _now(self) -> float:
        if self._plan.facts.machine.has_accelerator:
            torch.accelerator.synchronize()
        return time.perf_counter()


class PlanCheck(TrainerCallback):  # type: ignore[misc]
    """Prints predicted and measured numbers of the first steps, and adds them to ``plan.json`` and ``facts.json``.

    Args:
        recomputes: Hugging Face's checkpointing is on.
        without_mask: counts the bytes that each unit saves of full rows of one document each.
    """

    def __init__(
        self, plan: Plan, folder: Path, *, recomputes: bool, without_mask: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._plan, self._folder, self._without_mask = plan, folder, without_mask
        self._countable = not recomputes and deepspeed.stage(plan) != 3
        self._storages: dict[int, int] = {}
        self._masked = True
        self._timed = TimedSteps(plan, range(FIRST, LAST + 1) if plan.layout else range(0))
        self._began: tuple[int, int] | None = None  # bytes up and down when step 2 began
        self._rows: list[Comparison] = []
        self._model: nn.Module | None = None

    @contextmanager
    def counting(self, model: nn.Module, step: int) -> Iterator[None]:
        """Count inside what autograd saves (in step 1) or time blocks (in some steps after it)."""
        if not model.training:
            yield
        elif step == COUNTED - 1 and self._countable and not self._storages:
            with model.register_forward_pre_hook(self._look, with_kwargs=True), count_saved(model) as self._storages:
                yield
        else:
            with self._timed.forward(model, step + 1):
                yield

    def _look(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        padded = mask is not None and not bool(mask.all())
        self._masked = padded or (positions is not None and bool((positions.diff() != 1).any()))

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            self._model = kwargs["model"]
            self._began = self._traffic()
        self._timed.begin(state.global_step + 1)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._timed.end(state.global_step)
        if not state.is_world_process_zero:
            return
        if state.global_step == STEP:
            self._say(f"after step {STEP}", list(self.compared()))
        if state.global_step == LAST:
            self._compare_seconds()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step < LAST:
            self._compare_seconds()

    def _say(self, when: str, rows: list[Comparison]) -> None:
        """Print ``rows``, and write them into ``plan.json`` after those that are there."""
        self._rows += rows
        write_line(f"plan against run, {when}")
        for line in table(HEADER, (each.cells() for each in rows), HEADER[1:]):
            write_line(f"  {line}")
        file = self._folder / "plan.json"
        written = json.loads(file.read_text())
        written["measured"] = [{**asdict(each), "error": each.error} for each in self._rows]
        replace_file(file, json.dumps(written, indent=1))

    def _compare_seconds(self) -> None:
        if not self._timed.name:
            return
        timings = self._timed.unit_times()
        if rows := list(self._seconds(timings)):
            self._say(self._timed.name, rows)
        if timings is not None:
            block_timing.store(self._folder, self._plan.facts, timings)
            write_line(
                f"block times are in {self._folder / block_timing.FILE}; the next fresh run is planned with them"
            )

    def compared(self) -> Iterator[Comparison]:
        """All counts of bytes that can be measured on this machine."""
        plan = self._plan
        if self._storages:
            keeps = {unit: plan.saved_bytes(unit.name) for unit in plan.facts.units}
            other = {} if self._masked else self._without_mask()
            saved = (other.get(unit.name, size) if size == unit.saved_bytes else size for unit, size in keeps.items())
            yield Comparison("saved for backward", sum(saved), sum(self._storages.values()))
        on_device = device_peak_bytes()
        host = plan.peak(Home.HOST)
        if on_device is not None:
            yield Comparison("device, peak", plan.peak(Home.DEVICE), on_device)
        else:
            host += plan.peak(Home.DEVICE)  # the device is this machine's memory
        host += mapped_bytes(plan.layout) if plan.layout is not None else 0
        yield Comparison("process, peak", host, host_peak_bytes())
        if self._began is not None and (plan.layout is not None or plan.hosted_bytes()):
            facts = plan.facts_as_kept()
            up, down = traffic(facts, plan.layout or empty(facts), plan.facts.machine.rates or ASSUMED)
            now_up, now_down = self._traffic()
            yield Comparison("link up, step 2", up, now_up - self._began[0])
            yield Comparison("link down, step 2", down, now_down - self._began[1])

    def _seconds(self, timings: UnitTimes | None) -> Iterator[Comparison]:
        plan = self._plan
        cost = plan_cost(plan)
        if cost is None:
            return
        if timings is not None and plan.facts.machine.rates is not None:
            facts = replace(plan.facts_as_kept(), unit_times=timings)
            passes = plan.facts.run.accumulation
            found = passes * sum(map(sum, unit_seconds(facts, plan.facts.machine.rates)))
            yield Comparison("forward and backward", cost.compute_seconds, found, "seconds")
        if plan.facts.run.stages == 1:  # else the simulated one does not wait for other stages
            yield Comparison("a step", cost.seconds, self._timed.step_seconds, "seconds")

    def _traffic(self) -> tuple[int, int]:
        """Bytes that have crossed the link so far, up and down."""
        assert self._model is not None
        stowed, room = stowed_by(self._model), room_of(self._model)
        engine = (stowed.engine.transfer.bytes_up, stowed.engine.transfer.bytes_down) if stowed else (0, 0)
        saved = room.traffic if room is not None else (0, 0)
        return engine[0] + saved[0], engine[1] + saved[1]
