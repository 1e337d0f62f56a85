"""The plan against the run: predicted and measured bytes, compared after the second step, and seconds after a few more.

After two steps every buffer exists and every kernel has had its workspace. Three counts of bytes can be measured
exactly: the arenas of the memory engine, what autograd saves in one forward, and what crosses the link in one step.
Saved bytes are predicted for micro-batches of full length with a mask. Shorter ones save less, on the device and over
the link; one without a mask (full rows of one document each) saves less in attention, and is compared with a count of
its own, in units that keep everything. For the libraries in the process's peak the prediction has a round number.

Torch's hooks count what is saved in one micro-batch of step 1. Blocks that ``strategies.recompute`` has changed
report what they keep. Hugging Face's checkpointing, whose hooks are inside ours, is not counted, nor is ZeRO stage 3,
where gathered weights would count as saved.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from deepstow.strategies.core.facts import UnitTimes
from deepstow.strategies.core.layout import mapped_bytes
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine import stowed_by
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.checkpointing import checkpointed, room_of
from deepstow.strategies.parallel import deepspeed
from deepstow.strategies.planner.step_cost import empty, plan_cost, traffic, unit_seconds
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.strategies.report.short_plan import LABEL
from deepstow.strategies.report.table import table
from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.errors import write_line
from deepstow.trainer.machine import block_timing
from deepstow.trainer.machine.block_timing import UnitClock, median_of, without_again
from deepstow.trainer.run.callbacks.reports import device_peak_bytes, host_peak_bytes

COUNTED, STEP = 1, 2  # steps: what is saved is counted in the first, all is compared after the second
FIRST, LAST = 2, 8  # that are timed
HEADER = ("", "predicted", "measured", "error")
# Of what is compared, what is printed, by its name there; all of it is in plan.txt and plan.json.
PRINTED = {
    "device, peak": "device memory",
    "process, peak": "process memory",
    "link up, step 2": "link up",
    "link down, step 2": "link down",
    "a step": "time per step",
}
SAME = 0.005  # relative difference that is not said


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
        return (self.owner, self._shown(self.predicted), self._shown(self.measured), f"{100 * self.error:+.1f} %")

    @property
    def words(self) -> str:
        """The measured number, and how the predicted one differs."""
        expected = "planned" if self.unit == "bytes" else "simulated"
        if abs(self.error) < SAME:
            return f"{self._shown(self.measured)}, as {expected}"
        difference = f"{abs(self.error):.0%} {'more' if self.error > 0 else 'less'}"
        return f"{self._shown(self.measured)}; {expected}: {self._shown(self.predicted)}, {difference}"

    def _shown(self, number: float) -> str:
        return human(int(number)) if self.unit == "bytes" else f"{number:.3g} s"


def _row(label: str, words: str) -> str:
    return f"{label:<{LABEL}}{words}"


@contextmanager
def count_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield by address the bytes that autograd and recomputed blocks save; each storage once, without weights. Of other
    micro-batches, whose turns come between blocks, nothing counts: they are other coroutines.
    """
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # a block's first forward shows what it will keep and does not keep it yet
    coroutine = getcurrent()

    def show(tensor: Tensor) -> None:
        if getcurrent() is coroutine:
            alive.append(tensor)
            pack(tensor)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            weights = {param.untyped_storage().data_ptr() for param in model.parameters()}  # some have just come
            storages[address] = 0 if address in weights else storage.nbytes()
        return tensor

    recomputed = [watched for module in model.modules() if (watched := checkpointed(module)) is not None]
    for block in recomputed:
        block.watch = show
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield storages
    finally:
        alive.clear()
        for block in recomputed:
            block.watch = None


class PlanCheck(TrainerCallback):  # type: ignore[misc]
    """Prints what was measured in the first steps, and adds it to ``plan.txt``, ``plan.json`` and ``facts.json``.

    With a layout steps are timed, and units in all micro-batches of each. The median counts: while memory is
    touched for the first time and kernels choose their ways, a step takes up to a third longer. A shorter run is timed
    until its end. On an accelerator each border of a timed step waits for it.

    Args:
        shown: what ``plan.json`` has, on the first rank.
        recomputes: Hugging Face's checkpointing is on.
        without_mask: counts the bytes that each unit saves of full rows of one document each.
        evaluating: the planned peak of the device in an evaluation, bytes; 0 if it is not counted. It counts once there
            has been one.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        shown: str,
        *,
        recomputes: bool,
        without_mask: Callable[[], Mapping[str, int]] = dict,
        evaluating: int = 0,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._shown = shown
        self._without_mask = without_mask
        self._evaluating, self._evaluated = evaluating, False
        self._countable = not recomputes and deepspeed.stage(plan) != 3
        self._storages: dict[int, int] = {}
        self._masked, self._tokens = True, 0  # of the micro-batch that is counted: it needs a mask; tokens in a row
        self._timed = range(FIRST, LAST + 1) if plan.layout else range(0)
        self._clock: UnitClock | None = None  # of the present step
        self._hooks = ExitStack()  # its
        self._step_began_s = 0.0
        self._step_s: dict[int, float] = {}  # of each timed step
        self._unit_times: list[UnitTimes] = []
        self._began: tuple[int, int] | None = None  # bytes up and down when step 2 began
        self._rows: list[Comparison] = []
        self._model: nn.Module | None = None

    @contextmanager
    def counting(self, model: nn.Module, step: int) -> Iterator[None]:
        """Count inside what autograd saves (in step 1), or time blocks until the step ends (in some after it)."""
        counts = step == COUNTED - 1 and self._countable
        times = step + 1 in self._timed and self._clock is None
        if model.training and counts:
            self._countable = False  # others may begin before this one ends
            look = partial(self._look, getcurrent())
            with model.register_forward_pre_hook(look, with_kwargs=True), count_saved(model) as storages:
                yield
            self._storages = storages
        elif model.training and times and (blocks := find_blocks(model)):
            self._clock = UnitClock(model, blocks, next(model.parameters()).device)
            self._hooks.enter_context(self._clock.timing())  # until the step ends
            yield
        else:
            yield

    def _look(self, own: greenlet, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if getcurrent() is not own:
            return
        if (ids := kwargs.get("input_ids")) is not None:
            self._tokens = ids.shape[-1]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        padded = mask is not None and not bool(mask.all())
        self._masked = padded or (positions is not None and bool((positions.diff() != 1).any()))

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            self._model = kwargs["model"]
            self._began = self._traffic()
        if state.global_step + 1 in self._timed:
            self._clock, self._step_began_s = None, self._now()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step in self._timed:
            self._step_s[step] = self._now() - self._step_began_s
            self._hooks.close()
            if self._clock is not None and (times := self._clock.seconds()) is not None:
                self._unit_times.append(times)
        if state.is_world_process_zero and step == STEP:
            self._say(f"after step {STEP}", list(self.compared()))
            if 0 < self._tokens < (planned := self._plan.facts.run.sequence):
                write_line(
                    _row("", f"counted rows have {self._tokens:,} tokens; the plan is for the longest, {planned:,}")
                )
        if state.is_world_process_zero and step == LAST:
            self._compare_seconds()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._evaluated = True

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step < LAST:
            self._compare_seconds()

    def _say(self, when: str, rows: list[Comparison]) -> None:
        """Print the most important of ``rows``, and write all into ``plan.txt`` and ``plan.json`` after those there."""
        self._rows += rows
        important = (row for row in rows if row.owner in PRINTED and (row.predicted or row.measured))
        printed = [_row(PRINTED[row.owner], row.words) for row in important]
        write_line("\n".join([f"measured {when}:", *printed]))
        measured = [{**asdict(row), "error": row.error} for row in self._rows]
        with suppress(OSError):  # of a full disk; it has been printed
            content = json.dumps({**json.loads(self._shown), "measured": measured}, indent=1)
            replace_file(self._folder / "plan.json", content)
            self._note("", f"plan against run, {when}", *table(HEADER, (row.cells() for row in rows), HEADER[1:]))

    def _note(self, *lines: str) -> None:
        """Add lines to ``plan.txt``. Raises OSError."""
        file = self._folder / "plan.txt"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        replace_file(file, text + "\n".join([*lines, ""]))

    def _now(self) -> float:
        if self._plan.facts.machine.has_accelerator:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _compare_seconds(self) -> None:
        if not self._step_s:
            return
        first = min(self._step_s)
        last = max(self._step_s)
        timings = None
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        if self._unit_times:
            times = without_again(median_of(self._unit_times), self._plan.facts_as_kept())
            timings = replace(times, origin=f"measured in {steps} of a run")
        if rows := list(self._seconds(timings)):
            self._say(f"in {steps}", rows)
        else:
            step_s = statistics.median(self._step_s.values())
            rate = self._plan.facts.run.tokens_per_step / step_s
            write_line(f"measured in {steps}: {step_s:.3g} s per step, {rate:,.0f} tokens/s")
        if timings is not None:
            block_timing.store(self._folder, self._plan.facts, timings)
            with suppress(OSError):
                self._note(f"block times: {block_timing.FILE}, with which the next fresh run is planned")

    def compared(self) -> Iterator[Comparison]:
        """All counts of bytes that can be measured on this machine."""
        plan = self._plan
        if self._storages:
            keeps = {unit: plan.saved_bytes(unit.name) for unit in plan.facts.units}
            no_mask = {} if self._masked else self._without_mask()
            saved = (no_mask.get(unit.name, size) if size == unit.saved_bytes else size for unit, size in keeps.items())
            yield Comparison("saved for backward", sum(saved), sum(self._storages.values()))
        on_device = device_peak_bytes()
        host = plan.peak(Tier.HOST)
        if on_device is not None:
            planned = max(plan.peak(Tier.DEVICE), self._evaluating if self._evaluated else 0)
            yield Comparison("device, peak", planned, on_device)
        else:
            host += plan.peak(Tier.DEVICE)  # the device is this machine's memory
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
            measured_s = passes * sum(map(sum, unit_seconds(facts, plan.facts.machine.rates)))
            yield Comparison("forward and backward", cost.compute_seconds, measured_s, "seconds")
        if plan.facts.run.stages == 1:  # else the simulated one does not wait for other stages
            yield Comparison("a step", cost.seconds, statistics.median(self._step_s.values()), "seconds")

    def _traffic(self) -> tuple[int, int]:
        """Bytes that have crossed the link so far, up and down."""
        assert self._model is not None
        stowed, room = stowed_by(self._model), room_of(self._model)
        engine = (stowed.engine.transfer.bytes_up, stowed.engine.transfer.bytes_down) if stowed else (0, 0)
        saved = room.traffic if room is not None else (0, 0)
        return engine[0] + saved[0], engine[1] + saved[1]
