"""Measure how fast this machine computes each product of a linear layer over each route, and keep the times in a file.

A product is timed as training calls it, including any transposition of its operands, on more sets of operands than
caches hold. The routes of a shape take turns, and the least of each route's seconds counts: other work disturbs single
rounds, and a machine that slows down does so for all. A route whose result differs too much from torch's is left out.

The file has the times by machine, libraries, threads and settings; those of others are kept, but not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.linears import ELEMENT_BYTES, LEGAL, Gemm, Route, Shape, Timing
from deepstow.strategies.core.sizes import human_duration
from deepstow.strategies.planner.gemm_routes import shapes_of
from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import kept, key_of

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.machine.probe import Machine

Timer = Callable[[], float]  # runs something and returns its seconds
Say = Callable[[str], None]
Timings = dict[str, Timing]  # by shape

ROUNDS = 10
ROTATED_BYTES, MOST_SETS = 256 << 20, 8  # of operands that are used before one is used again
LEAST_TIMED_S = 5e-4  # of one reading; shorter products are repeated because clocks are coarse
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-12}  # of the largest result
NEEDED = {"copy", *(f"{gemm} {Route.NATIVE}" for gemm in Gemm)}  # of every timing
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FILE = TypeAdapter(dict[str, dict[str, dict[str, Seconds]]])  # by place, by shape
WHAT = "measurements of linear layers"


def for_config(config: RunConfig, facts: Facts, ranks: Ranks, machine: Machine, *, tune: bool, say: Say) -> Facts:
    """``facts`` with the timings that a strategy asks for, the same on all ranks: those of the file and, with ``tune``,
    those of other shapes that are measured within the strategy's budget.
    """
    import torch.distributed as dist

    from deepstow.trainer.distributed.agreement import WEEK_S, agreement

    asked = next((found for strategy in config.strategies.values() if (found := strategy.gemm_timing())), None)
    if asked is None or machine.origin == "profile":
        return facts
    budget_s, path = asked[0], Path(asked[1] or "~/.cache/deepstow/linear.json").expanduser()
    # In a plan for ranks that do not run yet, each gets its part of the cores.
    threads = None if ranks.local_world_size == 1 else max(1, machine.usable_cores // ranks.local_world_size)
    place, shapes = place_of(machine, threads), {str(shape): shape for shape in shapes_of(facts)}

    def find() -> Timings:
        measured, ignored = kept(path, FILE, WHAT)
        if ignored:
            say(ignored)
        elif measured and place not in measured:
            say(f"{path} is not used: nothing in it was measured on this machine, with these versions and settings")
        known = {shape: it for shape, it in (measured or {}).get(place, {}).items() if it.keys() >= NEEDED}
        missing = [shape for name, shape in shapes.items() if name not in known]
        if missing and tune:
            known |= measure(missing, machine.device_kind, budget_s, say)
            try:
                save(path, place, known)
            except OSError as error:
                say(f"{path} cannot be written ({error.strerror}): the next run measures again")
        return {name: known[name] for name in shapes if name in known}

    here = Ranks(dist.get_rank(), 0, dist.get_world_size()) if dist.is_initialized() else Ranks()
    with agreement(here, WEEK_S) as together:
        return replace(facts, timings=together.on_first(here.rank, find))


def place_of(machine: Machine, threads: int | None = None) -> str:
    """What timings depend on besides the shape; ``threads`` of a rank, None for those of this process."""
    import torch

    from deepstow.strategies.engine.memory import accelerator

    if machine.device_kind == "cpu":
        runs = f"threads {threads or torch.get_num_threads()}"
    else:
        runs = accelerator.row_of(torch.device(machine.device_kind)).software()
    exact = "deterministic" if torch.are_deterministic_algorithms_enabled() else ""
    here = [f"{name} {value}" for name, value in key_of(machine).items()]
    return ", ".join(filter(None, (*here, runs, f"matmul precision {torch.get_float32_matmul_precision()}", exact)))


def save(path: Path, place: str, timings: Timings) -> None:
    """Add ``timings`` to those of ``place``, or raise OSError."""
    measured = kept(path, FILE, WHAT)[0] or {}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, FILE.dump_json(measured | {place: measured.get(place, {}) | timings}, indent=1))


def measure(shapes: Sequence[Shape], device: str, budget_s: float, say: Say) -> Timings:
    """Time ``shapes`` until the budget is spent; the first one always, and each in at least two rounds."""
    began_s, found, left = time.perf_counter(), Timings(), ""
    for number, shape in enumerate(shapes):
        spent_s = time.perf_counter() - began_s
        if number and spent_s >= budget_s:
            left = f"; {len(shapes) - number} were not reached and stay native: raise strategies.linear.budget_s"
            break
        say(f"measuring linear layers, {number + 1} of {len(shapes)}: {shape}; {spent_s:.0f} of {budget_s:g} s")
        try:
            timers, ends_s = timers_of(shape, device), began_s + (budget_s + spent_s) / 2
            rounds = [{name: timer() for name, timer in timers.items()} for _ in range(2)]
            while len(rounds) < ROUNDS and time.perf_counter() < ends_s:
                rounds.append({name: timer() for name, timer in timers.items()})
            found[str(shape)] = {name: min(each[name] for each in rounds) for name in timers}
        except (RuntimeError, ValueError) as error:  # no memory for the operands, no kernel for the dtype, no numbers
            say(f"{shape} stays native, it could not be measured: {str(error).splitlines()[0]}")
    if device != "cpu":
        import torch

        torch.accelerator.empty_cache()
    say(f"measured {len(found)} shapes of linear layers in {human_duration(time.perf_counter() - began_s)}{left}")
    return found


def timers_of(shape: Shape, device: str) -> dict[str, Timer]:
    """What times each product over each route with torch's result, and writing the copy, by the names of ``Timing``."""
    import torch

    from deepstow.strategies.engine.forward import routed_linear
    from deepstow.trainer.machine.timing import timer

    widths = (shape.outputs, shape.inputs) if shape.stored == "out_in" else (shape.inputs, shape.outputs)
    sizes = {"x": (shape.rows, shape.inputs), "grad": (shape.rows, shape.outputs), "weight": widths, "copy": widths}
    num_bytes = ELEMENT_BYTES[shape.dtype] * sum(map(math.prod, sizes.values()))
    generator = torch.Generator(device).manual_seed(0)
    noise = partial(torch.randn, generator=generator, device=device, dtype=getattr(torch, shape.dtype))
    count = min(MOST_SETS, -(-ROTATED_BYTES // num_bytes))
    sets: list[dict[str, Any]] = [{name: noise(*size) for name, size in sizes.items()} for _ in range(count)]
    for operands in sets:
        operands["copy"] = routed_linear.transposed(operands["weight"])

    def compute(gemm: Gemm, route: Route, operands: dict[str, Any]) -> Any:
        weight = operands["copy" if route is Route.COPY else "weight"]
        first, second = operands["x" if gemm is Gemm.FORWARD else "grad"], operands["x"]
        return routed_linear.product(gemm, route, shape.stored, first, second if gemm is Gemm.WGRAD else weight)

    def timed(work: Callable[[Any], Any]) -> Timer:
        rotation = cycle(sets)
        return timer(lambda: work(next(rotation)), device, LEAST_TIMED_S)

    # Written as a routed layer writes it; torch is slower at the same copy with the transposition on the other side.
    timers = {"copy": timed(lambda operands: operands["copy"].t().copy_(operands["weight"].t()))}
    for gemm, routes in LEGAL.items():
        expected = compute(gemm, Route.NATIVE, sets[0]).float()
        allowed = TOLERANCE[shape.dtype] * math.sqrt(shape.rows) * max(float(expected.abs().max()), 1e-30)
        for route in routes:
            if float((compute(gemm, route, sets[0]).float() - expected).abs().max()) <= allowed:
                timers[f"{gemm} {route}"] = timed(partial(compute, gemm, route))
    if not timers.keys() >= NEEDED:
        raise ValueError("its products are no numbers")
    return timers
