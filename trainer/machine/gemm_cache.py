"""How fast this machine takes each product of a linear layer over each route: measured once, remembered in a file.

    measure    what the plan will want to know and the file does not have, within a budget of seconds
    known      what the file has; nothing is measured. Over ranks the first rank's answer is everybody's

A product is timed as training calls it (``trainer/machine/gemm_timing.py``), turning its operands included. The routes
of a product take turns, round after round, and the least of each route's seconds counts: work beside it disturbs single
rounds, and a machine that grows slower does so for all routes alike. What is far behind after two rounds gets no more
of them. A route whose result differs from torch's own by more than its dtype allows is left out.

The file holds what was measured on which machine with which libraries, threads and settings; only the entry of this
one is used. If there is none, or the file cannot be read, one line says so. Keys of shapes have dtype, rows, widths and
how the weight lies; what follows from these (the alignment of rows) and what is always the same (products are not
accumulated, beta = 0) is written into them, so that another release which does it otherwise finds another key.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.facts import Facts
from strategies.core.linears import ELEMENT_BYTES, Gemm, Route, Shape, Timed
from strategies.planner.gemm_routes import shapes_of
from trainer.machine.gemm_timing import REFRESH, ROUTED, STOCK, Bench, Product
from trainer.machine.profiles import MachineKey, key_of, unfinished
from trainer.run.metrics import human_duration

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

Say = Callable[[str], None]

FORMAT = 1
MOST_ENTRIES = 16  # machines and versions that one file remembers
ROUNDS = 10
HOPELESS = 1.3  # times the fastest: a route that is slower than this after two rounds gets no more of them


def stored_at() -> Path:
    """Where measurements are kept unless somebody says otherwise."""
    return Path.home() / ".cache/deepstow/linear.json"


# --- the file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """What timings were taken on and with; they hold for nothing else."""

    machine: MachineKey
    threads: int
    settings: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def place_of(machine: Machine, threads: int | None = None) -> Place:
    """Of this process. ``threads``: those that a rank will have, where it is not this process."""
    import torch

    from strategies.engine.memory import accelerator

    settings = [f"matmul precision {torch.get_float32_matmul_precision()}"]
    if torch.are_deterministic_algorithms_enabled():
        settings.append("deterministic")
    if machine.device_kind != "cpu":
        software = accelerator.row_of(torch.device(machine.device_kind)).software()
        settings += [software] if software else []
    counted = (threads or torch.get_num_threads()) if machine.device_kind == "cpu" else 0
    return Place(key_of(machine), counted, ", ".join(settings))


def name_of(shape: Shape) -> str:
    """The key of a shape in the file."""
    sizes = (shape.inputs * ELEMENT_BYTES[shape.dtype], shape.outputs * ELEMENT_BYTES[shape.dtype])
    aligned = min(math.gcd(size, 256) for size in sizes)
    widths = f"{shape.inputs}->{shape.outputs} {shape.stored}"
    return f"{shape.dtype} rows={shape.rows} {widths} align={aligned} beta=0"


def load(path: Path, place: Place) -> tuple[dict[str, Any], str]:
    """The entry of ``place``: timings by the name of the shape; and the line that says why there are none."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return {}, f"{path} is ignored: its format is {content['format']!r}, this is {FORMAT}"
        entries = [(dict(entry["place"]), dict(entry["shapes"])) for entry in content["measured"]]
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} is ignored: {error.strerror}"
    except (ValueError, TypeError, KeyError) as error:
        return {}, f"{path} is ignored: not measurements of linear layers ({type(error).__name__}: {error})"
    for found, shapes in entries:
        if found == place.to_json():
            return shapes, ""
    return {}, f"{path} is not used: nothing in it was measured on this machine, with these versions and settings"


def save(path: Path, place: Place, shapes: Mapping[str, Any]) -> None:
    """Add ``shapes`` to the entry of ``place``, the newest first; other machines' entries stay.

    Raises:
        OSError: it cannot be written.
    """
    held, _ = load(path, place)
    try:
        content = json.loads(path.read_text())
        others = (
            [e for e in content["measured"] if e["place"] != place.to_json()] if content["format"] == FORMAT else []
        )
    except (OSError, ValueError, TypeError, KeyError):
        others = []
    entry = {"place": place.to_json(), "shapes": {**held, **shapes}}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "measured": [entry, *others[: MOST_ENTRIES - 1]]}, indent=1)
    unfinished(path).write_text(text + "\n")
    unfinished(path).replace(path)


def to_json(timed: Timed) -> dict[str, Any]:
    """As the file has it."""
    return {
        **{gemm.value: {route.value: seconds for route, seconds in timed.of(gemm).items()} for gemm in Gemm},
        "refresh": timed.refresh_s,
        "overhead": timed.overhead_s,
    }


def from_json(shape: Shape, content: Any) -> Timed | None:
    """What ``to_json`` made; None where something else stands, which is then measured anew."""
    try:
        seconds = tuple(
            (gemm, Route(name), float(value)) for gemm in Gemm for name, value in content[gemm.value].items()
        )
        timed = Timed(shape, seconds, float(content["refresh"]), float(content["overhead"]))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    if not (0 <= timed.refresh_s < math.inf and 0 <= timed.overhead_s < math.inf):
        return None
    whole = all(Route.NATIVE in timed.of(gemm) for gemm in Gemm)
    return timed if whole and all(0 < value < math.inf for *_, value in timed) else None


# --- facts -----------------------------------------------------------------------------------------------------------


def for_config(config: RunConfig, facts: Facts, ranks: Ranks, machine: Machine, *, tune: bool, say: Say) -> Facts:
    """``facts`` with the timings that the config's linear strategy wants; all ranks of a job get the first one's.

    Args:
        tune: measure what is missing, within the strategy's budget.
    """
    strategy: Any = config.strategies.get("linear")
    if strategy is None or strategy.transpose != "adaptive" or machine.origin == "profile":
        return facts
    path = stored_at() if strategy.cache is None else Path(strategy.cache).expanduser()
    # Where a plan is made for a job of several ranks that does not run, a rank will have its part of the cores.
    threads = None if ranks.local_world_size == 1 else max(1, machine.usable_cores // ranks.local_world_size)
    budget_s = strategy.budget_s if tune else 0.0
    return of_all_ranks(
        facts, lambda: with_timings(facts, machine, path=path, threads=threads, budget_s=budget_s, say=say)
    )


def with_timings(
    facts: Facts,
    machine: Machine,
    *,
    path: Path,
    threads: int | None = None,
    budget_s: float = 0.0,
    say: Say = lambda line: None,
) -> Facts:
    """``facts`` with the timings of their shapes: from the file, and, as far as the budget goes, measured now.

    Args:
        threads: of a rank, where it is not this process.
        budget_s: 0 measures nothing.
        say: takes a line of progress, or of what is amiss.
    """
    import torch

    place, shapes = place_of(machine, threads), shapes_of(facts)
    held, ignored = load(path, place)
    if ignored:
        say(ignored)
    found = {shape: from_json(shape, held[name_of(shape)]) for shape in shapes if name_of(shape) in held}
    timings = {shape: timed for shape, timed in found.items() if timed is not None}
    missing = [shape for shape in shapes if shape not in timings]
    if missing and budget_s > 0:
        new = tune(missing, Bench(machine.device_kind).prepare, budget_s, say)
        timings |= new
        if machine.device_kind != "cpu":
            torch.accelerator.empty_cache()
        try:
            save(path, place, {name_of(shape): to_json(timed) for shape, timed in new.items()})
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}): the next run measures again")
    return replace(facts, timings=tuple(timings.values()))


def of_all_ranks(facts: Facts, decide: Callable[[], Facts]) -> Facts:
    """``decide()`` on the first rank of a job that runs; the others take its timings, so that all choose alike."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    group = dist.new_group(backend="gloo")
    decided = [decide().timings if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(decided, src=0, group=group)
    dist.destroy_process_group(group)
    assert decided[0] is not None
    return replace(facts, timings=decided[0])


# --- measuring -------------------------------------------------------------------------------------------------------


def tune(
    shapes: Sequence[Shape],
    prepare: Callable[[Shape], Mapping[Product, Callable[[], float]]],
    budget_s: float,
    say: Say,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Shape, Timed]:
    """Timings of ``shapes``, in this order, until the budget is spent; a shape that is begun is finished.

    Args:
        prepare: gives what runs a product once over a route and returns its seconds, and ``REFRESH``, ``STOCK``
            and ``ROUTED`` likewise.
    """
    began_s = clock()
    found: dict[Shape, Timed] = {}
    longest_s, failed = 0.0, 0
    for number, shape in enumerate(shapes, start=1):
        spent_s = clock() - began_s
        if spent_s + longest_s > budget_s and found:
            break
        say(f"measuring linear layers, {number} of {len(shapes)}: {shape}; {spent_s:.0f} of {budget_s:g} s")
        try:
            found[shape] = _timed(shape, prepare(shape), (budget_s - spent_s) / 2, clock)
        except RuntimeError as error:  # no memory for its operands, no kernel for its dtype
            failed += 1
            say(f"{shape} stays native, it could not be measured: {str(error).splitlines()[0]}")
        longest_s = max(longest_s, clock() - began_s - spent_s)
    left = len(shapes) - len(found) - failed
    spent = human_duration(clock() - began_s)
    say(
        f"measured {len(found)} shapes of linear layers in {spent}"
        + (f"; {left} were not reached and stay native: raise strategies.linear.budget_s" if left else "")
    )
    return found


def _timed(
    shape: Shape, runs: Mapping[Product, Callable[[], float]], most_s: float, clock: Callable[[], float]
) -> Timed:
    """The least of several interleaved rounds; fewer where they take longer than ``most_s``, but two."""
    least = dict.fromkeys(runs, math.inf)
    left = list(runs)
    began_s = clock()
    for number in range(ROUNDS):
        round_s = clock()
        for product in left:
            least[product] = min(least[product], runs[product]())
        if number >= 1:
            left = [product for product in left if _may_win(product, least)]
            if clock() + (clock() - round_s) - began_s > most_s:
                break
    overhead_s = max(0.0, least.get(ROUTED, 0.0) - least.get(STOCK, 0.0))
    seconds = tuple((gemm, route, least[gemm, route]) for gemm in Gemm for route in Route if (gemm, route) in least)
    return Timed(shape, seconds, least.get(REFRESH, 0.0), overhead_s)


def _may_win(product: Product, least: Mapping[Product, float]) -> bool:
    """Whether it is worth another round: native always, others while they are near the fastest of their product."""
    if isinstance(product, str) or product[1] is Route.NATIVE:
        return True
    fastest = min(value for other, value in least.items() if not isinstance(other, str) and other[0] is product[0])
    return least[product] <= HOPELESS * fastest
