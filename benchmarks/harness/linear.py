"""The benchmark ``linear``: the products of linear layers over every route, and training steps with what was chosen.

Each case is measured twice, apart: routes are chosen by the first measurement and judged by the second. A case in which
the choice turns out slower than native, or misses something much faster, is measured and judged again, at most twice;
both measurements then keep the lesser of their seconds. The record is written after every case.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import processes, record, work
from benchmarks.harness.shapes import Case, Verdict, judge, merged, summary, table, to_json
from strategies.core.linears import Linear, Routes, Timed
from strategies.planner.gemm_routes import fastest, minimal
from trainer.errors import ExitCode
from trainer.run.metrics import human_duration

Say = Callable[[str], None]
AGAIN = 2


def linear(
    todo: Sequence[Case],
    accumulation: int,
    each_s: float,
    steps: int,
    out: Path,
    command: str,
    say: Say = print,
    model: str = "45m",
) -> ExitCode:
    """Run it all.

    Args:
        each_s: seconds of one measurement of one case, about; the largest take longer.
        steps: rounds of training steps; 0 leaves them out.
        model: what the training steps train.

    Raises:
        ConfigError: there is no room for the record in ``out``.
    """
    around = processes.surroundings()
    folder = record.new_folder(out, "linear", around["hardware"])
    book = _Book(folder, command, accumulation, around)
    try:
        for number, case in enumerate(todo, start=1):
            say(f"case {number} of {len(todo)}, {book.elapsed()}: {case.shape}")
            book.add(*measured(case, accumulation, each_s))
        lengths = sorted({case.shape.rows for case in todo})
        for length in dict.fromkeys([lengths[0], lengths[-1]]) if steps else ():
            say(f"training steps of {length} tokens a micro-batch, {book.elapsed()}")
            book.steps.append(training_steps(model, length, accumulation, steps, say))
    except KeyboardInterrupt:
        say("interrupted; these cases had ended")
        book.write()
        return ExitCode.INTERRUPTED
    say(f"\n{book.write()}\nrecord: {folder}")
    return ExitCode.FINISHED


class _Book:
    """What has been measured so far, on the disk after every case."""

    def __init__(self, folder: Path, command: str, accumulation: int, around: dict[str, Any]) -> None:
        import torch

        from trainer.machine.probe import others_cpu_s

        self._folder, self._began_s, self._others_s = folder, time.perf_counter(), others_cpu_s()
        self._head = {
            "command": command,
            "commit": record.commit(),
            "accumulation": accumulation,
            "threads": torch.get_num_threads(),
            **around,
        }
        self._verdicts: list[Verdict] = []
        self._timings: list[list[Timed]] = []
        self.steps: list[dict[str, Any]] = []

    def elapsed(self) -> str:
        return human_duration(time.perf_counter() - self._began_s)

    def add(self, verdict: Verdict, timings: list[Timed]) -> None:
        self._verdicts.append(verdict)
        self._timings.append(timings)
        self.write()

    def write(self) -> str:
        from trainer.machine.gemm_cache import to_json as timed_to_json
        from trainer.machine.probe import cores, others_cpu_s

        seconds = time.perf_counter() - self._began_s
        share = max(0.0, others_cpu_s() - self._others_s) / (seconds * cores()[1])
        head = self._head
        text = (
            f"{len(self._verdicts)} cases; {head['accumulation']} micro-batches per optimizer step; "
            f"{head['hardware']['name']}, {head['threads']} threads; torch {head['versions']['torch']}; "
            f"commit {head['commit']}; {self.elapsed()}; others used {share:.0%} of the cores\n\n"
        )
        text += "\n".join([table(self._verdicts), *self._steps()]) + "\n"
        cases = [
            {**to_json(verdict), "measurements": [timed_to_json(timed) for timed in timings]}
            for verdict, timings in zip(self._verdicts, self._timings, strict=True)
        ]
        content = {**head, "elapsed_s": seconds, "others_share": share, "steps": self.steps, "cases": cases}
        (self._folder / "record.json").write_text(json.dumps(content, indent=1) + "\n")
        (self._folder / "table.md").write_text(text)
        return "\n".join([*summary(self._verdicts), *self._steps()])

    def _steps(self) -> list[str]:
        return [line for each in self.steps for line in ("", *step_lines(each))]


def measured(case: Case, accumulation: int, each_s: float) -> tuple[Verdict, list[Timed]]:
    """One case, measured and judged, again where it is suspicious."""
    first, second = _once(case, each_s), _once(case, each_s)
    verdict = judge(case, accumulation, first, second)
    for again in range(1, AGAIN + 1):
        if not verdict.suspicious:
            break
        first, second = merged(first, _once(case, each_s)), merged(second, _once(case, each_s))
        verdict = judge(case, accumulation, first, second, again)
    return verdict, [first, second]


def _once(case: Case, each_s: float) -> Timed:
    from strategies.engine.memory import accelerator
    from trainer.machine.gemm_cache import tune
    from trainer.machine.gemm_timing import Bench

    return tune([case.shape], Bench(accelerator.kind() or "cpu").prepare, 2 * each_s, lambda line: None)[case.shape]


# --- training steps --------------------------------------------------------------------------------------------------


def training_steps(model: str, length: int, accumulation: int, rounds: int, say: Say) -> dict[str, Any]:
    """Optimizer steps of a small Llama, stock and with the routes of both modes, in turn.

    Args:
        length: tokens of a micro-batch.
    """
    import torch

    from benchmarks.harness import child
    from strategies.engine.memory import accelerator
    from strategies.engine.routed_linear import copies_of, route, weights_changed

    device = accelerator.current() or torch.device("cpu")
    done = work.work(model, accumulation=accumulation, rows=1, length=length)
    stock = child.llama(done).to(device).train()
    batches = child.tokens(done, device)[0]
    layers = _layers_of(stock, batches[0])
    timings = _timings_of(layers, device.type, say)
    by_mode: dict[str, dict[str, Routes]] = {
        "plain": {},
        "native": {name: Routes() for name in layers},  # nothing is changed: how far two equal models lie apart
        "minimal": {name: minimal(layer, accumulation) for name, layer in layers.items()},
        "adaptive": {
            name: fastest(layer, accumulation, timings[layer.shape], copies=True).routes
            for name, layer in layers.items()
        },
    }
    runs: dict[str, Callable[[], float]] = {}
    for mode, routes in by_mode.items():
        routed = copy.deepcopy(stock)
        route(routed, routes)
        runs[mode] = _stepper(routed, batches, accumulation, partial(weights_changed, copies_of(routed)))
    seconds: dict[str, list[float]] = {mode: [] for mode in runs}
    for number in range(rounds + 1):
        for mode, run in runs.items():
            taken_s = run()
            if number:  # the first is a warm-up
                seconds[mode].append(taken_s)
    return {
        "model": model,
        "tokens_per_step": done.tokens,
        "dtype": done.dtype,
        "seconds": seconds,
        "routes": {mode: {name: str(each) for name, each in routes.items()} for mode, routes in by_mode.items()},
    }


def _layers_of(model: Any, batch: Any) -> dict[str, Linear]:
    from strategies.engine.blocks import find_blocks
    from trainer.model.linear_layers import LinearCounter

    counter = LinearCounter()
    with counter.counting(model):
        model(**batch)
    blocks = find_blocks(model)
    found = counter.listed(blocks, None, recomputes=False)
    return {f"{layer.unit}.{layer.name}" if layer.unit in blocks else layer.name: layer for layer in found}


def _timings_of(layers: dict[str, Linear], device: str, say: Say) -> dict[Any, Timed]:
    from trainer.machine.gemm_cache import tune
    from trainer.machine.gemm_timing import Bench

    shapes = list(dict.fromkeys(layer.shape for layer in layers.values()))
    return tune(shapes, Bench(device).prepare, 60.0, say)


def _stepper(
    model: Any, batches: Sequence[Any], accumulation: int, announce: Callable[[], None]
) -> Callable[[], float]:
    import torch

    from strategies.engine.memory import accelerator

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        began_s = time.perf_counter()
        for batch in batches:
            (model(**batch).loss / accumulation).backward()
        optimizer.step()
        announce()
        optimizer.zero_grad()
        if accelerator.kind() is not None:
            torch.accelerator.synchronize()
        return time.perf_counter() - began_s

    return step


def step_lines(steps: dict[str, Any]) -> list[str]:
    """Training steps as a table; ratios are taken within a round."""
    plain = steps["seconds"]["plain"]
    lines = [
        f"Optimizer steps of a {steps['model']} Llama, {steps['tokens_per_step']} tokens, {steps['dtype']}, "
        f"{len(plain)} rounds",
        "",
        "| linear layers | least | median | of plain, median of rounds | min to max |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mode, seconds in steps["seconds"].items():
        ratios = [one / other for one, other in zip(seconds, plain, strict=True)]
        lines.append(
            f"| {mode} | {min(seconds):.3f} s | {statistics.median(seconds):.3f} s | {statistics.median(ratios):.3f} | "
            f"{min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return lines
