"""Measure how fast this machine computes each product of a linear layer over each route, and keep the times in a file.

A product is timed as training calls it, including any transposition of its operands, on more sets of operands than
caches hold. The routes of a shape take turns, and the least of each route's seconds counts: other work disturbs single
rounds, and a machine that slows down does so for all. A route whose result differs too much from torch's is left out.

The file has the times by machine, libraries, threads and settings; those of others are kept, but not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from strategies.core.commit import replace_file
from strategies.core.facts import Facts
from strategies.core.linears import ELEMENT_BYTES, LEGAL, Gemm, Route, Shape, Timed
from strategies.core.sizes import human_duration
from strategies.planner.gemm_routes import shapes_of
from trainer.machine.profiles import key_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

Timer = Callable[[], float]  # runs something and returns its seconds
Say = Callable[[str], None]
REFRESH = (Gemm.WGRAD, Route.COPY)  # stands for writing the copy, which wgrad does not read

ROUNDS = 10
ROTATED_BYTES, MOST_SETS = 256 << 20, 8  # of operands that are used before one is used again
LEAST_TIMED_CPU_S, LEAST_TIMED_S = 2e-5, 5e-4  # of one reading; shorter products are repeated because clocks are coarse
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-12}  # of the largest result
OPERANDS = {Gemm.FORWARD: ("x", "weight"), Gemm.DGRAD: ("grad", "weight"), Gemm.WGRAD: ("grad", "x")}


def for_config(config: RunConfig, facts: Facts, ranks: Ranks, machine: Machine, *, tune: bool, say: Say) -> Facts:
    """``facts`` with the timings that a strategy asks for, the same on all ranks: those of the file and, with ``tune``,
    those of other shapes that are measured within the strategy's budget.
    """
    import torch

    asked = next((found for strategy in config.strategies.values() if (found := strategy.gemm_timing())), None)
    if asked is None or machine.origin == "profile":
        return facts
    budget_s, path = asked[0], Path(asked[1] or "~/.cache/deepstow/linear.json").expanduser()
    # In a plan for ranks that do not run yet, each gets its part of the cores.
    threads = None if ranks.local_world_size == 1 else max(1, machine.usable_cores // ranks.local_world_size)
    place = place_of(machine, threads)

    def find() -> tuple[Timed, ...]:
        measured, ignored = load(path)
        if ignored:
            say(ignored)
        elif measured and place not in measured:
            say(f"{path} is not used: nothing in it was measured on this machine, with these versions and settings")
        shapes, known = shapes_of(facts), {timed.shape: timed for timed in measured.get(place, [])}
        missing = [shape for shape in shapes if shape not in known]
        if missing and tune:
            new = measure(missing, partial(timers_of, device=machine.device_kind), budget_s, say)
            if machine.device_kind != "cpu":
                torch.accelerator.empty_cache()
            try:
                save(path, place, new)
            except OSError as error:
                say(f"{path} cannot be written ({error.strerror}): the next run measures again")
            known |= {timed.shape: timed for timed in new}
        return tuple(known[shape] for shape in shapes if shape in known)

    return replace(facts, timings=of_first_rank(find))


def of_first_rank(find: Callable[[], tuple[Timed, ...]]) -> tuple[Timed, ...]:
    """The result of ``find()`` on the first rank of a job that runs, so that all ranks choose alike."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return find()
    group = dist.new_group(backend="gloo")
    found = [find() if dist.get_rank() == 0 else ()]
    dist.broadcast_object_list(found, src=0, group=group)
    dist.destroy_process_group(group)
    return found[0]


# --- the file --------------------------------------------------------------------------------------------------------


_FILE = TypeAdapter(dict[str, list[Timed]])  # by place


def place_of(machine: Machine, threads: int | None = None) -> str:
    """What timings depend on besides the shape; ``threads`` of a rank, None for those of this process."""
    import torch

    from strategies.engine.memory import accelerator

    on_cpu = machine.device_kind == "cpu"
    settings = [
        *(f"{name} {value}" for name, value in key_of(machine).items()),
        f"threads {threads or torch.get_num_threads()}" if on_cpu else None,
        f"matmul precision {torch.get_float32_matmul_precision()}",
        "deterministic" if torch.are_deterministic_algorithms_enabled() else None,
        None if on_cpu else accelerator.row_of(torch.device(machine.device_kind)).software(),
    ]
    return ", ".join(filter(None, settings))


def load(path: Path) -> tuple[dict[str, list[Timed]], str]:
    """Timings by place, and why the file is ignored, for people; no line if there is none."""
    try:
        return _FILE.validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} is ignored: {error.strerror}"
    except ValidationError as error:
        return {}, f"{path} is ignored: no measurements of linear layers ({error.errors()[0]['msg']})"


def save(path: Path, place: str, timings: Sequence[Timed]) -> None:
    """Add ``timings`` to those of ``place``, or raise OSError."""
    measured, _ = load(path)
    known = {timed.shape: timed for timed in (*measured.get(place, []), *timings)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _FILE.dump_json(measured | {place: [*known.values()]}, indent=1))


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    shapes: Sequence[Shape],
    prepare: Callable[[Shape], Mapping[tuple[Gemm, Route], Timer]],
    budget_s: float,
    say: Say,
    clock: Timer = time.perf_counter,
) -> list[Timed]:
    """Time ``shapes``, with the timers that ``prepare`` gives, until the budget is spent; the first one always."""
    began_s, found, reached = clock(), list[Timed](), 0
    for shape in shapes:
        spent_s = clock() - began_s
        if reached and spent_s >= budget_s:
            break
        reached += 1
        say(f"measuring linear layers, {reached} of {len(shapes)}: {shape}; {spent_s:.0f} of {budget_s:g} s")
        try:
            found.append(_timed(shape, prepare(shape), (budget_s - spent_s) / 2, clock))
        except (RuntimeError, ValueError) as error:  # no memory for the operands, no kernel for the dtype, no numbers
            say(f"{shape} stays native, it could not be measured: {str(error).splitlines()[0]}")
    left = len(shapes) - reached
    rest = f"; {left} were not reached and stay native: raise strategies.linear.budget_s" if left else ""
    say(f"measured {len(found)} shapes of linear layers in {human_duration(clock() - began_s)}{rest}")
    return found


def _timed(shape: Shape, timers: Mapping[tuple[Gemm, Route], Timer], most_s: float, clock: Timer) -> Timed:
    """The least seconds of several rounds; of two, if they take longer than ``most_s``."""
    least, began_s = dict.fromkeys(timers, math.inf), clock()
    for number in range(ROUNDS):
        if number > 1 and clock() - began_s > most_s:
            break
        least = {product: min(least[product], timer()) for product, timer in timers.items()}
    refresh_s = least.pop(REFRESH)
    return Timed(shape, tuple((*product, seconds) for product, seconds in least.items()), refresh_s)


def timers_of(shape: Shape, device: str) -> dict[tuple[Gemm, Route], Timer]:
    """Timers of each product over each legal route with torch's result, and of ``REFRESH``."""
    import torch

    from strategies.engine.forward import routed_linear

    num_bytes = 2 * shape.weight_bytes + shape.rows * (shape.inputs + shape.outputs) * ELEMENT_BYTES[shape.dtype]
    widths = (shape.outputs, shape.inputs) if shape.stored == "out_in" else (shape.inputs, shape.outputs)
    sizes = {"x": (shape.rows, shape.inputs), "grad": (shape.rows, shape.outputs), "weight": widths}
    generator = torch.Generator(device).manual_seed(0)
    noise = partial(torch.randn, generator=generator, device=device, dtype=getattr(torch, shape.dtype))
    count = min(MOST_SETS, -(-ROTATED_BYTES // num_bytes))
    sets: list[dict[str, Any]] = [{name: noise(*size) for name, size in sizes.items()} for _ in range(count)]
    for operands in sets:
        operands["copy"] = routed_linear.transposed(operands["weight"])

    def compute(gemm: Gemm, route: Route, operands: Mapping[str, Any]) -> Any:
        first, second = OPERANDS[gemm]
        second = "copy" if route is Route.COPY else second
        return routed_linear.product(gemm, route, shape.stored, operands[first], operands[second])

    # Written as a routed layer writes it; torch is slower at the same copy with the transposition on the other side.
    timers = {REFRESH: _timer(lambda operands: operands["copy"].t().copy_(operands["weight"].t()), sets, device)}
    for gemm in Gemm:
        expected = compute(gemm, Route.NATIVE, sets[0]).float()
        allowed = TOLERANCE[shape.dtype] * math.sqrt(shape.rows) * max(float(expected.abs().max()), 1e-30)
        for route in LEGAL[gemm]:
            if float((compute(gemm, route, sets[0]).float() - expected).abs().max()) <= allowed:
                timers[gemm, route] = _timer(partial(compute, gemm, route), sets, device)
    return timers


def _timer(work: Callable[[Any], Any], sets: Sequence[Any], device: str) -> Timer:
    """Times ``work`` on the next of ``sets``, as often as the clock needs."""
    from trainer.machine.timing import timer

    rotation = cycle(sets)
    return timer(lambda: work(next(rotation)), device, LEAST_TIMED_CPU_S if device == "cpu" else LEAST_TIMED_S)
