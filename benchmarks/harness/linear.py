"""The benchmark ``linear``: products of linear layers over every route, and training steps with the chosen routes.

A case is one shape of well-known models at one number of tokens in one dtype. Its seconds are those of an optimizer
step of so many micro-batches. Each case is measured twice: routes are chosen by the first measurement and judged by the
second. ``best`` is chosen and judged by the second, so noise is in its favour.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import record, work
from strategies.core.linears import LEGAL, NATIVE, Linear, Routes, Shape, Timing
from strategies.core.sizes import human_duration
from strategies.planner.gemm_routes import fastest, minimal, seconds
from strategies.report.table import table as aligned
from trainer.machine.gemm_timing import Say, measure

Case = dict[str, Any]  # as in the record

# Inputs and outputs of attention's projections (fused where the model fuses them) and the MLP's; published configs.
MODELS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "opt-6.7b": ((4096, 4096), (4096, 16384), (16384, 4096)),
    "llama-7b": ((4096, 4096), (4096, 11008), (11008, 4096)),
    "bloom-7b": ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)),
    "gpt2-xl": ((1600, 4800), (1600, 1600), (1600, 6400), (6400, 1600)),
    "qwen2.5-3b": ((2048, 2048), (2048, 256), (2048, 11008), (11008, 2048)),
    "qwen3-8b": ((4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096)),
    "llama-3-8b": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)),
}
TURNED = ("gpt2-xl",)  # its Conv1D stores inputs x outputs
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
EQUAL = 0.01  # smaller differences are noise
MODES = ("minimal", "adaptive", "best")


def wanted(models: Sequence[str], tokens: Sequence[str], dtypes: Sequence[str]) -> dict[Shape, list[str]]:
    """The shapes that a command line names, the fewest tokens first, with the models that have them; none means all.

    Raises:
        ConfigError: a name or number that is not allowed.
    """
    names = dict.fromkeys(work.choice("--models", name, MODELS) for name in models or MODELS)
    kinds = dict.fromkeys(work.choice("--dtypes", name, DTYPES) for name in dtypes or DTYPES)
    rows = sorted({work.whole("--tokens", text) for text in tokens})
    found: dict[Shape, list[str]] = {}
    for count, kind, name in product(rows, kinds, names):
        for inputs, outputs in MODELS[name]:
            shape = Shape(count, inputs, outputs, "in_out" if name in TURNED else "out_in", DTYPES[kind])
            found.setdefault(shape, []).append(name)
    return found


def judge(shape: Shape, accumulation: int, first: Timing, second: Timing) -> Case:
    """A case of the record: routes are chosen by the first measurement, and their seconds taken from the second."""
    layer = Linear("layer", "unit", shape)

    def seconds_of(routes: Routes) -> float:  # a route may be left out of the second measurement
        return seconds(routes, layer, accumulation, defaultdict(lambda: math.inf, second))

    routes = {
        "native": NATIVE,
        "minimal": minimal(layer, accumulation),
        "adaptive": fastest(layer, accumulation, first, copies=True),
        "best": min((Routes(*each) for each in product(*LEGAL.values())), key=seconds_of),
    }
    return {
        "shape": asdict(shape),
        **{f"{mode}_s": seconds_of(each) for mode, each in routes.items()},
        "routes": {mode: str(routes[mode]) for mode in MODES},
        "measurements": [first, second],
    }


def ratio(case: Case, mode: str) -> float:
    """Seconds relative to native."""
    return float(case[f"{mode}_s"] / case["native_s"])


def timed(shapes: Sequence[Shape], budget_s: float, say: Say = lambda line: None) -> list[Timing]:
    """Time ``shapes`` on the accelerator, or without one on the CPU."""
    from strategies.engine.memory import accelerator

    found = measure(shapes, accelerator.kind() or "cpu", budget_s, say)
    return [found[str(shape)] for shape in shapes]


def training_steps(model: str, length: int, accumulation: int, rounds: int, say: Say) -> dict[str, Any]:
    """Time optimizer steps of a small Llama, plain and with each mode's routes, in turn; ``length`` tokens at once."""
    import torch

    from benchmarks.harness import child
    from benchmarks.harness.contenders import Plain
    from strategies.engine.forward.routed_linear import route, weights_changed
    from strategies.engine.memory import accelerator
    from trainer.model.counting import Counter

    device = accelerator.current() or torch.device("cpu")
    done = work.work(model, accumulation=accumulation, rows=1, length=length)
    stock = child.llama(done).to(device).train()
    batches = child.tokens(done, device)[0]
    with Counter(stock) as counter:
        stock(**batches[0])
    layers = counter.linears()
    shapes = list(dict.fromkeys(layer.shape for layer in layers.values()))
    timings = dict(zip(shapes, timed(shapes, 60.0, say), strict=True))
    by_mode: dict[str, dict[str, Routes]] = {
        "plain": {},
        "native": {},  # another plain one, which shows how far two equal models lie apart
        "minimal": {path: minimal(layer, accumulation) for path, layer in layers.items()},
        "adaptive": {
            path: fastest(layer, accumulation, timings[layer.shape], copies=True) for path, layer in layers.items()
        },
    }
    trained = {mode: Plain(done, copy.deepcopy(stock), device) for mode in by_mode}
    for mode, routes in by_mode.items():
        route(trained[mode].model, routes)
    taken: dict[str, list[float]] = {mode: [] for mode in by_mode}
    for mode, contender in list(trained.items()) * (rounds + 1):
        began_s = time.perf_counter()
        for batch in batches:
            contender.micro_batch(batch)
        contender.update()
        weights_changed(contender.model)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken[mode].append(time.perf_counter() - began_s)
    return {
        "model": model,
        "tokens_per_step": done.tokens,
        "dtype": done.dtype,
        "seconds": {mode: seconds[1:] for mode, seconds in taken.items()},  # the first one warms up
        "routes": {mode: {path: str(each) for path, each in routes.items()} for mode, routes in by_mode.items()},
    }


def table(cases: Sequence[Case]) -> list[str]:
    """One row per case: milliseconds natively, the others relative to it."""
    rows = []
    for case in cases:
        shape, takes = case["shape"], case["routes"]["adaptive"]
        layer = f"{shape['inputs']} -> {shape['outputs']}" + (" turned" if shape["stored"] == "in_out" else "")
        takes = "native" if takes == str(NATIVE) else takes
        ratios = (f"{ratio(case, mode):.3f}" for mode in MODES)
        native = f"{case['native_s'] * 1e3:.3f} ms"
        rows.append((shape["dtype"], str(shape["rows"]), layer, ", ".join(case["models"]), native, *ratios, takes))
    head = ("dtype", "tokens", "layer", "models", "native", *MODES, "adaptive takes")
    return aligned(head, rows, head[4:-1], markdown=True)


def summary(cases: Sequence[Case]) -> list[str]:
    """All cases together and by dtype."""
    rows = []
    for dtype in dict.fromkeys(("all", *(case["shape"]["dtype"] for case in cases))):
        group = [case for case in cases if dtype in ("all", case["shape"]["dtype"])]
        for mode in MODES:
            ratios = [ratio(case, mode) for case in group] or [1.0]
            better, worse = (sum(sign * (each - 1) > EQUAL for each in ratios) for sign in (-1, 1))
            mean, worst = statistics.geometric_mean(ratios), max(ratios)
            counts = map(str, (better, len(group) - better - worse, worse))
            rows.append((f"{dtype}: {len(group)}", mode, *counts, f"{mean:.3f}", f"{worst:.3f}"))
    stay = sum(case["routes"]["adaptive"] == str(NATIVE) for case in cases)
    head = ("cases", "", "better", "equal", "worse", "geometric mean", "worst")
    said = f"Seconds of an optimizer step, relative to native. Adaptive leaves {stay} of {len(cases)} layers untouched."
    return [*aligned(head, rows, head[2:], markdown=True), "", said]


def step_lines(steps: Mapping[str, Any]) -> list[str]:
    """Training steps as a table; ratios are taken within a round."""
    plain, rows = steps["seconds"]["plain"], []
    for mode, taken in steps["seconds"].items():
        ratios = [one / other for one, other in zip(taken, plain, strict=True)]
        times = (f"{min(taken):.3f} s", f"{statistics.median(taken):.3f} s", f"{statistics.median(ratios):.3f}")
        rows.append((mode, *times, f"{min(ratios):.3f} to {max(ratios):.3f}"))
    return [
        "",
        f"Optimizer steps of a {steps['model']} Llama, {steps['tokens_per_step']} tokens, {steps['dtype']}, "
        f"{len(plain)} rounds",
        "",
        *aligned(("linear layers", "least", "median", "of plain, median of rounds", "min to max"), rows, markdown=True),
    ]


def question(todo: Mapping[Shape, Sequence[str]], given: argparse.Namespace, say: Say) -> record.Question:
    """Measure every case with the options ``given``, then training steps.

    ``--seconds`` are those of one measurement of one case, about; the largest take longer. 0 rounds of training steps
    leave them out.
    """

    def ask(around: Mapping[str, Any], logs: Path) -> Iterator[tuple[dict[str, Any], str]]:
        import torch

        from trainer.machine.probe import cores, others_cpu_s

        began_s, others_s = time.perf_counter(), others_cpu_s()
        cases, steps = list[Case](), list[dict[str, Any]]()

        def elapsed() -> str:
            return human_duration(time.perf_counter() - began_s)

        def found() -> tuple[dict[str, Any], str]:
            elapsed_s, threads = time.perf_counter() - began_s, torch.get_num_threads()
            others = max(0.0, others_cpu_s() - others_s) / (elapsed_s * cores()[1])
            conditions = (
                f"{len(cases)} cases; {given.accumulation} micro-batches per optimizer step; "
                f"{around['hardware']['name']}, {threads} threads; torch {around['versions']['torch']}; "
                f"commit {around['commit']}; {elapsed()}; others used {others:.0%} of the cores"
            )
            told = {"accumulation": given.accumulation, "threads": threads, "elapsed_s": elapsed_s}
            told |= {"others_share": others, "steps": steps, "cases": cases}
            lines = [*table(cases), "", *summary(cases), *(line for each in steps for line in step_lines(each))]
            return told, "\n".join([conditions, "", *lines]) + "\n"

        for number, (shape, models) in enumerate(todo.items(), start=1):
            say(f"case {number} of {len(todo)}, {elapsed()}: {shape}")
            first, second = (timed([shape], 2 * given.seconds)[0] for _ in range(2))
            cases.append({"models": models, **judge(shape, given.accumulation, first, second)})
            yield found()
        lengths = {min(shape.rows for shape in todo), max(shape.rows for shape in todo)}
        for length in sorted(lengths) if given.steps else ():
            say(f"training steps of {length} tokens a micro-batch, {elapsed()}")
            steps.append(training_steps(given.step_model, length, given.accumulation, given.steps, say))
            yield found()

    return ask
