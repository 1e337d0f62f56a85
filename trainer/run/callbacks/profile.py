"""``training.profile``: a torch profiler's trace of some steps, with the engine's copies and waits by name, and a
picture of one of them beside the simulated step.

The step before the first is for warming up. Nothing of the result changes; a run that takes no profile pays nothing. A
trace that cannot be written is one line, and the run goes on.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function, schedule, supported_activities
from transformers import TrainerCallback, TrainerState

from deepstow.strategies.core.facts import UnitKind
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine.named import name_calls, name_engine
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.errors import write_line
from deepstow.trainer.planning import chrome_trace, picture

STREAMS = {"compute": Resource.COMPUTE, "up": Resource.UP, "down": Resource.DOWN, "cpu": Resource.CPU}
STREAMS |= {"net": Resource.NET}
ON_GPU = (("HtoD", Resource.UP), ("DtoH", Resource.DOWN), ("nccl", Resource.NET), ("", Resource.COMPUTE))


class Profile(TrainerCallback):
    """Profiles some optimizer ``steps`` of ``trainer``, first and last, into the folder ``profile`` of the run."""

    def __init__(self, trainer: Any, plan: Plan, steps: Sequence[int], folder: Path, model: str) -> None:
        self._trainer = trainer
        self._plan = plan
        self._model = model
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
        for unit in self._plan.facts.units:
            if unit.kind is UnitKind.BLOCK:
                self._name_forwards(unit.name)
        name_calls(self._names, self._trainer.accelerator, "backward", lambda *_: "compute: backward")
        if self._trainer.stowed is not None:
            name_engine(self._names, self._trainer.stowed)
        self._profiler = profile(
            activities=supported_activities(),
            schedule=schedule(wait=0, warmup=1, active=self._last - self._first + 1, repeat=1),
            on_trace_ready=self._write,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # the worker's as well
        )
        self._profiler.start()

    def _name_forwards(self, name: str) -> None:
        """By hooks, since others replace the forward of a block."""
        block, opened = self._trainer.model.get_submodule(name), list[Any]()

        def enter(*_: Any) -> None:
            opened.append(record_function(f"compute: forward {name}"))
            opened[-1].__enter__()

        self._names.enter_context(block.register_forward_pre_hook(enter))
        self._names.enter_context(block.register_forward_hook(lambda *_: opened.pop().__exit__(None, None, None)))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._step.__exit__(None, None, None)
            self._profiler.step()
            if state.global_step >= self._last:
                self.on_train_end()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Which may be in the middle of the steps."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            self._names.close()

    def _write(self, profiler: Any) -> None:
        rank = self._trainer.args.process_index
        path = self._folder / f"steps-{self._first}-{self._last}-rank-{rank}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
            if rank == 0:
                self._show(measured(json.loads(path.read_text())["traceEvents"]))
                write_line(f"profile: {path} and {self._folder / 'step.json'} for ui.perfetto.dev")
        except (OSError, RuntimeError) as error:
            write_line(f"training.profile: {path}: not written: {error}")

    def _show(self, step: tuple[float, Sequence[TraceEvent]]) -> None:
        """The simulated step, if there is one, and this measured one: as a trace, and as a picture. Raises OSError."""
        cost, shown = plan_cost(self._plan), self._folder / "step.png"
        simulated = {} if cost is None else {"simulated": (cost.seconds, cost.outcome.events)}
        steps = {**simulated, "measured": step}
        chrome_trace.write(steps, self._folder / "step.json")
        if why := picture.cannot(shown):
            write_line(f"training.profile: {shown}: {why}")
        else:
            picture.save(picture.beside(self._plan, steps, model=self._model), shown)
            write_line(f"profile: simulated and measured step: {shown}")


def measured(trace: Iterable[Mapping[str, Any]]) -> tuple[float, list[TraceEvent]]:
    """The profiled step of median length: its seconds, and what worked when. On a GPU kernels and copies are what it
    did, with the name around them; on a CPU they are the named ranges themselves.
    """
    events = sorted((event for event in trace if event.get("ph") == "X"), key=lambda each: each["ts"])
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    around = [event for event in events if event.get("cat") == "gpu_user_annotation" and ": " in event["name"]]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted((event["dur"], event["ts"]) for event in ranges if re.fullmatch(r"step \d+", event["name"]))
    length, begin = steps[len(steps) // 2]
    streams = ["cpu"] if on_gpu else list(STREAMS)
    work = [
        (STREAMS[stream], label, event)
        for event in ranges
        for stream, _, label in [event["name"].partition(": ")]
        if stream in streams
    ]
    for task in on_gpu:
        near = around[: bisect(around, task["ts"], key=lambda one: one["ts"])][-8:]
        names = [span["name"] for span in near if span["tid"] == task["tid"] and task["ts"] < span["ts"] + span["dur"]]
        label = names[-1].partition(": ")[2] if names else "backward"  # whose thread names nothing
        work.append((next(resource for word, resource in ON_GPU if word in task["name"]), label, task))
    cut = [(it, max(e["ts"] - begin, 0), min(e["ts"] + e["dur"] - begin, length), label) for it, label, e in work]
    return length / 1e6, [TraceEvent(it, start / 1e6, end / 1e6, label) for it, start, end, label in cut if start < end]
