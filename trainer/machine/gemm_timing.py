"""Measure how fast this machine computes each product of a linear layer over each route, and keep the times in a file.

A product is timed as training calls it, including any transposition of its operands. In training some operands have
just been written (the input in forward, the gradient in backward) and are in a cache; the others were used long ago.
So products rotate through several sets of operands, more than caches hold, and on a CPU the recent operand is read
before the clock starts. An accelerator runs many products per reading instead, for its caches are small beside them.

The routes of a shape take turns, and the least of each route's seconds counts: other work disturbs single rounds, and a
machine that slows down does so for all routes. A route whose result differs too much from torch's own is left out.

An entry of the file holds for one machine with its libraries, threads and settings; other entries are kept, but not
used. If the file cannot be read, or has no entry for this machine, one line says so. The key of a shape contains all
that a timing depends on, and also what follows from the rest (alignment) or never changes (beta = 0), so that a release
that changes these uses other keys. With several ranks the first one reads and measures, and all take its timings.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.commit import replace_file
from strategies.core.facts import Facts
from strategies.core.linears import ELEMENT_BYTES, LEGAL, Gemm, Route, Routes, Shape, Timed
from strategies.core.sizes import human_duration
from strategies.planner.gemm_routes import shapes_of
from trainer.machine.profiles import key_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

Product = tuple[Gemm, Route] | str
Timer = Callable[[], float]  # runs something and returns its seconds
Say = Callable[[str], None]
REFRESH, STOCK, ROUTED = "refresh", "stock", "routed"  # timed besides products: writing the copy; a tiny layer, twice

FORMAT = 1
MOST_ENTRIES = 16
ROUNDS = 10
HOPELESS = 1.3  # times the fastest: a route slower than this after two rounds is not timed again
ROTATED_BYTES, MOST_SETS = 256 << 20, 8  # of operands that are used before one is used again
LEAST_TIMED_CPU_S, LEAST_TIMED_S = 2e-5, 5e-4  # of one reading; shorter products are repeated because clocks are coarse
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-12}  # of the largest result
OPERANDS = {Gemm.FORWARD: ("x", "weight"), Gemm.DGRAD: ("grad", "weight"), Gemm.WGRAD: ("grad", "x")}  # recent, other


def for_config(config: RunConfig, facts: Facts, ranks: Ranks, machine: Machine, *, tune: bool, say: Say) -> Facts:
    """``facts`` with the timings that a strategy asks for, the same on all ranks: those of the file and, with ``tune``,
    those of other shapes that are measured within the strategy's budget.
    """
    import torch

    asked = next((found for strategy in config.strategies.values() if (found := strategy.gemm_timing())), None)
    if asked is None or machine.origin == "profile":
        return facts
    budget_s, cache = asked
    path = Path("~/.cache/deepstow/linear.json" if cache is None else cache).expanduser()
    # In a plan for ranks that do not run yet, each gets its part of the cores.
    threads = None if ranks.local_world_size == 1 else max(1, machine.usable_cores // ranks.local_world_size)
    place = place_of(machine, threads)

    def find() -> tuple[Timed, ...]:
        known, ignored = load(path, place)
        if ignored:
            say(ignored)
        found = {shape: from_json(shape, known.get(name_of(shape))) for shape in shapes_of(facts)}
        timings = [timed for timed in found.values() if timed is not None]
        missing = [shape for shape, timed in found.items() if timed is None]
        if missing and tune:
            new = measure(missing, partial(timers_of, device=machine.device_kind), budget_s, say)
            if machine.device_kind != "cpu":
                torch.accelerator.empty_cache()
            try:
                save(path, place, new)
            except OSError as error:
                say(f"{path} cannot be written ({error.strerror}): the next run measures again")
            timings += new
        return tuple(timings)

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


def place_of(machine: Machine, threads: int | None = None) -> dict[str, Any]:
    """What timings depend on besides the shape, as JSON; ``threads`` of a rank, None for those of this process."""
    import torch

    from strategies.engine.memory import accelerator

    on_cpu = machine.device_kind == "cpu"
    settings = [
        f"matmul precision {torch.get_float32_matmul_precision()}",
        "deterministic" if torch.are_deterministic_algorithms_enabled() else None,
        None if on_cpu else accelerator.row_of(torch.device(machine.device_kind)).software(),
    ]
    return {
        "machine": key_of(machine),
        "threads": (threads or torch.get_num_threads()) if on_cpu else 0,
        "settings": ", ".join(filter(None, settings)),
    }


def name_of(shape: Shape) -> str:
    """The key of a shape in the file."""
    width = ELEMENT_BYTES[shape.dtype]
    aligned = math.gcd(shape.inputs * width, shape.outputs * width, 256)
    return f"{shape.dtype} rows={shape.rows} {shape.inputs}->{shape.outputs} {shape.stored} align={aligned} beta=0"


def _entries(path: Path) -> tuple[list[tuple[Mapping[str, Any], dict[str, Any]]], str]:
    """Places with their timings, by the key of the shape, and why the file is ignored; no line if there is none."""
    try:
        content = json.loads(path.read_text())
        if content["format"] == FORMAT:
            return [(dict(entry["place"]), dict(entry["shapes"])) for entry in content["measured"]], ""
        why = f"its format is {content['format']!r}, this is {FORMAT}"
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, TypeError, KeyError) as error:
        why = f"not measurements of linear layers ({type(error).__name__}: {error})"
    return [], f"{path} is ignored: {why}"


def load(path: Path, place: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Timings of ``place`` by the key of their shape, and a line for people if the file is there but of no use."""
    entries, ignored = _entries(path)
    for found, shapes in entries:
        if found == place:
            return shapes, ""
    other = f"{path} is not used: nothing in it was measured on this machine, with these versions and settings"
    return {}, ignored or (other if path.exists() else "")


def save(path: Path, place: Mapping[str, Any], timings: Sequence[Timed]) -> None:
    """Add ``timings`` to the entry of ``place`` and move it to the front; the oldest beyond ``MOST_ENTRIES`` go.

    Raises:
        OSError: the file cannot be written.
    """
    entries, _ = _entries(path)
    known = next((shapes for found, shapes in entries if found == place), {})
    new = known | {name_of(timed.shape): to_json(timed) for timed in timings}
    entries = [(place, new), *(entry for entry in entries if entry[0] != place)][:MOST_ENTRIES]
    measured = [{"place": found, "shapes": shapes} for found, shapes in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"format": FORMAT, "measured": measured}, indent=1) + "\n")


def to_json(timed: Timed) -> dict[str, Any]:
    """The timings of a shape as the file has them."""
    return {**{gemm: timed.of(gemm) for gemm in Gemm}, "refresh": timed.refresh_s, "overhead": timed.overhead_s}


def from_json(shape: Shape, content: Any) -> Timed | None:
    """The inverse of ``to_json``; None for anything else."""
    try:
        times = {(gemm, Route(name)): float(value) for gemm in Gemm for name, value in content[gemm].items()}
        rest = float(content["refresh"]), float(content["overhead"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    native = all((gemm, Route.NATIVE) in times for gemm in Gemm)
    valid = all(0 < value < math.inf for value in times.values()) and all(0 <= value < math.inf for value in rest)
    return Timed(shape, tuple((*key, value) for key, value in times.items()), *rest) if native and valid else None


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    shapes: Sequence[Shape],
    prepare: Callable[[Shape], Mapping[Product, Timer]],
    budget_s: float,
    say: Say,
    clock: Timer = time.perf_counter,
) -> list[Timed]:
    """Time ``shapes``, with the timers that ``prepare`` gives, until the budget is spent; the first one always."""
    began_s, longest_s, failed = clock(), 0.0, 0
    found: list[Timed] = []
    for number, shape in enumerate(shapes, start=1):
        spent_s = clock() - began_s
        if found and spent_s + longest_s > budget_s:
            break
        say(f"measuring linear layers, {number} of {len(shapes)}: {shape}; {spent_s:.0f} of {budget_s:g} s")
        try:
            found.append(_timed(shape, prepare(shape), (budget_s - spent_s) / 2, clock))
        except RuntimeError as error:  # no memory for the operands, no kernel for the dtype
            failed += 1
            say(f"{shape} stays native, it could not be measured: {str(error).splitlines()[0]}")
        longest_s = max(longest_s, clock() - began_s - spent_s)
    left = len(shapes) - len(found) - failed
    rest = f"; {left} were not reached and stay native: raise strategies.linear.budget_s" if left else ""
    say(f"measured {len(found)} shapes of linear layers in {human_duration(clock() - began_s)}{rest}")
    return found


def _timed(shape: Shape, timers: Mapping[Product, Timer], most_s: float, clock: Timer) -> Timed:
    """The least seconds of several rounds; of at least two, if they take longer than ``most_s``."""
    least = dict.fromkeys(timers, math.inf)
    began_s = clock()
    for number in range(ROUNDS):
        round_s = clock()
        fastest = {gemm: min(least[other] for other in least if other[0] is gemm) for gemm in Gemm}
        for product, timer in timers.items():
            behind = isinstance(product, tuple) and least[product] > HOPELESS * fastest[product[0]]
            if number < 2 or not behind or product[1] is Route.NATIVE:
                least[product] = min(least[product], timer())
        if number >= 1 and clock() + (clock() - round_s) - began_s > most_s:
            break
    seconds = tuple((gemm, route, least[gemm, route]) for gemm in Gemm for route in Route if (gemm, route) in least)
    return Timed(shape, seconds, least[REFRESH], max(0.0, least[ROUTED] - least[STOCK]))


def timers_of(shape: Shape, device: str) -> dict[Product, Timer]:
    """Timers of each product over each legal route with torch's result; of ``REFRESH``, ``STOCK`` and ``ROUTED``."""
    import torch
    from torch import nn

    from strategies.engine.forward import routed_linear

    num_bytes = 2 * shape.weight_bytes + shape.rows * (shape.inputs + shape.outputs) * ELEMENT_BYTES[shape.dtype]
    widths = (shape.outputs, shape.inputs) if shape.stored == "out_in" else (shape.inputs, shape.outputs)
    sizes = {"x": (shape.rows, shape.inputs), "grad": (shape.rows, shape.outputs), "weight": widths}
    generator = torch.Generator(device).manual_seed(0)
    noise = partial(torch.randn, generator=generator, device=device, dtype=getattr(torch, shape.dtype))
    sets = [
        {name: noise(*size) for name, size in sizes.items()}
        for _ in range(min(MOST_SETS, -(-ROTATED_BYTES // num_bytes)))
    ]
    for operands in sets:
        operands["copy"] = routed_linear.transposed(operands["weight"])

    def compute(gemm: Gemm, route: Route, operands: Mapping[str, Any]) -> Any:
        first, second = OPERANDS[gemm]
        second = "copy" if route is Route.COPY else second
        return routed_linear.product(gemm, route, shape.stored, operands[first], operands[second])

    timers: dict[Product, Timer] = {}
    for gemm in Gemm:
        expected = compute(gemm, Route.NATIVE, sets[0]).float()
        allowed = TOLERANCE[shape.dtype] * math.sqrt(shape.rows) * max(float(expected.abs().max()), 1e-30)
        for route in LEGAL[gemm]:
            if float((compute(gemm, route, sets[0]).float() - expected).abs().max()) <= allowed:
                timers[gemm, route] = _timer(partial(compute, gemm, route), sets, device, OPERANDS[gemm][0])
    # Written as a routed layer writes it; torch is slower at the same copy with the transposition on the other side.
    timers[REFRESH] = _timer(lambda operands: operands["copy"].t().copy_(operands["weight"].t()), sets, device)
    # A layer that is so small that its products cost nothing.
    x, grad = torch.zeros(1, 2, 8, device=device, requires_grad=True), torch.zeros(1, 2, 8, device=device)
    layers = nn.ModuleDict({name: nn.Linear(8, 8, bias=False, device=device) for name in (STOCK, ROUTED)})
    routed_linear.route(layers, {ROUTED: Routes(wgrad=Route.LEFT)})
    return timers | {
        name: _timer(lambda layer: layer(x).backward(grad), [made], device) for name, made in layers.items()
    }


def _timer(work: Callable[[Any], Any], sets: Sequence[Any], device: str, recent: str | None = None) -> Timer:
    """Times ``work`` on the next of ``sets``, as often as the clock needs; training has just written ``recent``."""
    import torch

    rotation, times = cycle(sets), 1
    least_s = LEAST_TIMED_CPU_S if device == "cpu" else LEAST_TIMED_S
    wait: Callable[[], object] = (lambda: None) if device == "cpu" else torch.accelerator.synchronize

    def run() -> float:
        nonlocal times
        while True:
            batch = [next(rotation) for _ in range(times)]
            if recent and device == "cpu":
                batch[0][recent].sum()
            wait()
            began_s = time.perf_counter()
            for operands in batch:
                work(operands)
            wait()
            taken_s = time.perf_counter() - began_s
            if taken_s >= least_s or times >= 1 << 12:
                return taken_s / times
            times *= max(2, min(16, math.ceil(1.5 * least_s / max(taken_s, 1e-9))))

    return run
