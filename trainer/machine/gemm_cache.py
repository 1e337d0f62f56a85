"""The file of measured products of linear layers, and the timings of a run: from the file, or measured now.

An entry of the file holds for one machine with its libraries, threads and settings; other entries are kept, but not
used. If the file cannot be read, or has no entry for this machine, one line says so. The key of a shape contains all
that a timing depends on, and also what follows from the rest (alignment) or never changes (beta = 0), so that a release
that changes these uses other keys. With several ranks the first one reads and measures, and all take its timings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.commit import replace_file
from strategies.core.facts import Facts
from strategies.core.linears import ELEMENT_BYTES, Gemm, Route, Shape, Timed
from strategies.planner.gemm_routes import shapes_of
from trainer.machine.gemm_timing import Say, timers_of, tune
from trainer.machine.profiles import key_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

Place = Mapping[str, Any]

FORMAT = 1
MOST_ENTRIES = 16


def place_of(machine: Machine, threads: int | None = None) -> Place:
    """What timings depend on besides the shape, as JSON.

    Args:
        threads: of a rank; None means those of this process.
    """
    import torch

    from strategies.engine.memory import accelerator

    settings = [f"matmul precision {torch.get_float32_matmul_precision()}"]
    if torch.are_deterministic_algorithms_enabled():
        settings.append("deterministic")
    threads = threads or torch.get_num_threads()
    if machine.device_kind != "cpu":
        software = accelerator.row_of(torch.device(machine.device_kind)).software()
        settings += [software] if software else []
        threads = 0
    return {"machine": key_of(machine), "threads": threads, "settings": ", ".join(settings)}


def name_of(shape: Shape) -> str:
    """The key of a shape in the file."""
    width = ELEMENT_BYTES[shape.dtype]
    aligned = math.gcd(shape.inputs * width, shape.outputs * width, 256)
    return f"{shape.dtype} rows={shape.rows} {shape.inputs}->{shape.outputs} {shape.stored} align={aligned} beta=0"


def load(path: Path, place: Place) -> tuple[dict[str, Any], str]:
    """Timings of ``place`` by the key of their shape, and a line for people if the file is there but of no use."""
    try:
        entries = _entries(path)
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} is ignored: {error.strerror}"
    except RuntimeError as error:
        return {}, f"{path} is ignored: {error}"
    except (ValueError, TypeError, KeyError) as error:
        return {}, f"{path} is ignored: not measurements of linear layers ({type(error).__name__}: {error})"
    for found, shapes in entries:
        if found == place:
            return shapes, ""
    return {}, f"{path} is not used: nothing in it was measured on this machine, with these versions and settings"


def _entries(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        raise RuntimeError(f"its format is {content['format']!r}, this is {FORMAT}")
    return [(dict(entry["place"]), dict(entry["shapes"])) for entry in content["measured"]]


def save(path: Path, place: Place, shapes: Mapping[str, Any]) -> None:
    """Add ``shapes`` to the entry of ``place`` and move it to the front; the oldest beyond ``MOST_ENTRIES`` go.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        entries = _entries(path)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        entries = []
    known = next((known for found, known in entries if found == place), {})
    kept = [(place, {**known, **shapes}), *(entry for entry in entries if entry[0] != place)][:MOST_ENTRIES]
    content = {"format": FORMAT, "measured": [{"place": found, "shapes": known} for found, known in kept]}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")


def to_json(timed: Timed) -> dict[str, Any]:
    """The timings of a shape as the file has them."""
    return {
        **{gemm.value: {route.value: seconds for route, seconds in timed.of(gemm).items()} for gemm in Gemm},
        "refresh": timed.refresh_s,
        "overhead": timed.overhead_s,
    }


def from_json(shape: Shape, content: Any) -> Timed | None:
    """The inverse of ``to_json``; None for anything else."""
    try:
        times = tuple((gemm, Route(name), float(value)) for gemm in Gemm for name, value in content[gemm.value].items())
        timed = Timed(shape, times, float(content["refresh"]), float(content["overhead"]))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    native = all(Route.NATIVE in timed.of(gemm) for gemm in Gemm)
    positive = all(0 < value < math.inf for *_, value in times)
    rest = all(0 <= value < math.inf for value in (timed.refresh_s, timed.overhead_s))
    return timed if native and positive and rest else None


def for_config(config: RunConfig, facts: Facts, ranks: Ranks, machine: Machine, *, tune: bool, say: Say) -> Facts:
    """``facts`` with the timings that the linear strategy asks for, the same on all ranks.

    Args:
        tune: measure what the file does not have, within the strategy's budget.
    """
    timing = next((found for strategy in config.strategies.values() if (found := strategy.gemm_timing())), None)
    if timing is None or machine.origin == "profile":
        return facts
    path = Path("~/.cache/deepstow/linear.json" if timing.cache is None else timing.cache).expanduser()
    # In a plan for ranks that do not run yet, each gets its part of the cores.
    threads = None if ranks.local_world_size == 1 else max(1, machine.usable_cores // ranks.local_world_size)
    budget_s = timing.budget_s if tune else 0.0
    timings = of_first_rank(
        lambda: timings_of(shapes_of(facts), machine, path, threads=threads, budget_s=budget_s, say=say)
    )
    return replace(facts, timings=timings)


def timings_of(
    shapes: Sequence[Shape], machine: Machine, path: Path, *, threads: int | None, budget_s: float, say: Say
) -> tuple[Timed, ...]:
    """The timings of ``shapes`` that the file ``path`` has, and those of others that are measured within ``budget_s``.

    Args:
        threads: as for ``place_of``.
    """
    import torch

    place = place_of(machine, threads)
    known, ignored = load(path, place)
    if ignored:
        say(ignored)
    found = {shape: from_json(shape, known.get(name_of(shape))) for shape in shapes}
    timings = [timed for timed in found.values() if timed is not None]
    missing = [shape for shape in shapes if found[shape] is None]
    if missing and budget_s > 0:
        new = tune(missing, lambda shape: timers_of(shape, machine.device_kind), budget_s, say)
        timings += new.values()
        if machine.device_kind != "cpu":
            torch.accelerator.empty_cache()
        try:
            save(path, place, {name_of(shape): to_json(timed) for shape, timed in new.items()})
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}): the next run measures again")
    return tuple(timings)


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
