"""``training.profile``: a torch profiler's trace of some steps, with the engine's copies and waits by name, and a
picture of one of them beside the simulated step.

The step before the first is for warming up. Nothing of the result changes; a run that takes no profile pays nothing. A
trace that cannot be written is one line, and the run goes on.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function, schedule, supported_activities
from transformers import TrainerCallback, TrainerState

from strategies.core.facts import UnitKind
from strategies.core.plan import Plan
from strategies.engine.named import named
from strategies.planner.simulate import TraceEvent
from strategies.planner.step_cost import plan_cost
from strategies.planner.tasks import Resource
from trainer.errors import write_line

RESOURCES = {"compute": Resource.COMPUTE, "up": Resource.UP, "down": Resource.DOWN, "cpu": Resource.CPU}
RESOURCES |= {"net": Resource.NET}


class Profile(TrainerCallback):
    """Profiles the optimizer steps ``first`` to ``last`` of ``trainer``, into the folder ``profile`` of the run."""

    def __init__(self, trainer: Any, plan: Plan, steps: Sequence[int], folder: Path, model: str) -> None:
        self._trainer, self._plan, self._model = trainer, plan, model
        (self._first, self._last), self._folder = steps, folder / "profile"
        self._profiler: Any = None
        self._step: Any = None
        self._names = ExitStack()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 >= self._first and args.process_index == 0:
            write_line(f"training.profile: not taken: the run goes on after step {state.global_step}")

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step + 2 == self._first:
            self._start()
        if self._profiler is not None:
            self._step = record_function(f"step {state.global_step + 1}")
            self._step.__enter__()

    def _start(self) -> None:
        for block in (unit.name for unit in self._plan.facts.units if unit.kind is UnitKind.BLOCK):
            self._names.enter_context(_forwards(self._trainer.model, block))
        self._names.enter_context(_backwards(self._trainer.accelerator))
        if self._trainer.stowed is not None:
            self._names.enter_context(named(self._trainer.stowed))
        self._profiler = profile(
            activities=supported_activities(),
            schedule=schedule(wait=0, warmup=1, active=self._last - self._first + 1, repeat=1),
            on_trace_ready=self._write,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # the worker's as well
        )
        self._profiler.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._step.__exit__(None, None, None)
            self._profiler.step()
            if state.global_step >= self._last:
                self._stop()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._profiler is not None:  # the run ends in the middle of it
            self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._names.close()

    def _write(self, profiler: Any) -> None:
        rank = self._trainer.args.process_index
        path = self._folder / f"steps-{self._first}-{self._last}-rank-{rank}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
            if rank == 0:
                from trainer.planning import picture

                seconds, events = measured(json.loads(path.read_text())["traceEvents"])
                shown = self._folder / "step.png"
                picture.beside(self._plan, plan_cost(self._plan), seconds, events, shown, model=self._model)
                write_line(f"profile: {path} for ui.perfetto.dev; simulated and measured step: {shown}")
        except (OSError, RuntimeError) as error:
            write_line(f"training.profile: {path}: not written: {error}")


@contextmanager
def _forwards(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Inside, each forward of a block has a name."""
    block, opened = model.get_submodule(name), list[Any]()

    def enter(*_: Any) -> None:
        opened.append(record_function(f"compute: forward {name}"))
        opened[-1].__enter__()

    handles = [
        block.register_forward_pre_hook(enter),
        block.register_forward_hook(lambda *_: opened.pop().__exit__(None, None, None), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _backwards(accelerator: Any) -> Iterator[None]:
    former = accelerator.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        with record_function("compute: backward"):
            former(*args, **kwargs)

    accelerator.backward = backward
    try:
        yield
    finally:
        del accelerator.backward


def measured(trace: Iterable[Mapping[str, Any]]) -> tuple[float, list[TraceEvent]]:
    """The profiled step of median length: its seconds, and what worked when. On a GPU kernels and copies are what it
    did, with the name around them; on a CPU they are the named ranges themselves.
    """
    events = sorted((each for each in trace if each.get("ph") == "X"), key=lambda each: each["ts"])
    on_gpu = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy")]
    ranges = [each for each in events if each.get("cat") == "user_annotation"]
    steps = sorted((each["dur"], each["ts"]) for each in ranges if re.fullmatch(r"step \d+", each["name"]))
    seconds, start = steps[len(steps) // 2]
    named_there = [each for each in events if each.get("cat") == "gpu_user_annotation" and ": " in each["name"]]
    found = [(*_split(each["name"]), each) for each in ranges if ": " in each["name"]]
    if on_gpu:
        found = [each for each in found if each[0] in (Resource.CPU, Resource.NET)]
        found += [(_lane(each), _around(each, named_there), each) for each in on_gpu]
    inside = []
    for resource, label, each in found:
        begin, end = max(each["ts"] - start, 0), min(each["ts"] + each["dur"] - start, seconds)
        if resource is not None and begin < end:
            inside.append(TraceEvent(resource, begin / 1e6, end / 1e6, label))
    return seconds / 1e6, inside


def _split(name: str) -> tuple[Resource | None, str]:
    lane, _, label = name.partition(": ")
    return RESOURCES.get(lane), label


def _lane(event: Mapping[str, Any]) -> Resource:
    """What does this on a GPU."""
    for word, resource in (("HtoD", Resource.UP), ("DtoH", Resource.DOWN), ("nccl", Resource.NET)):
        if word in event["name"]:
            return resource
    return Resource.COMPUTE


def _around(event: Mapping[str, Any], ranges: list[Mapping[str, Any]]) -> str:
    """The label of the range on its stream that it is in. Backward runs in a thread that has none."""
    for each in reversed(ranges[: bisect(ranges, event["ts"], key=lambda each: each["ts"])][-8:]):
        if each["tid"] == event["tid"] and event["ts"] < each["ts"] + each["dur"]:
            return _split(str(each["name"]))[1]
    return "backward"
