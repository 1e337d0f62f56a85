"""Measured compute time of each unit: of a few blocks before a run, or of all of them in its first steps.

Marks are set at the borders of blocks, after the memory engine has waited for weights, so that no unit's time includes
that. A block's backward lies between the node that made its output and the gradient of its input; what lies before the
first block and after the last is embedding and head. Recomputation in backward is subtracted as counted.

The times are in ``facts.json`` of the run folder, under ``measured``, and the next fresh run is planned with them. A
plan never changes inside a run, so a resumed one uses the times that its plan was made with: ``unit_times`` there.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from deepstow.strategies.core.facts import Facts, UnitKind, UnitTimes
from deepstow.strategies.planner.step_cost import unit_seconds
from deepstow.strategies.state.commit import replace_file

if TYPE_CHECKING:
    import torch
    from torch import nn

FILE = "facts.json"
TIMES = TypeAdapter(UnitTimes)
BLOCKS, ROUNDS = 3, 3  # how many blocks ``measure`` runs, and how often
LEAST = 1e-9  # seconds; a unit that takes no time would divide by zero
# What is timed begins with these marks, and lasts until the next mark, if that is one of those.
SPANS = {
    "start": ("embedded",),
    "in": ("out",),
    "head": ("end",),
    "end": ("head", "backward"),
    "backward": ("backward", "done"),
}


@dataclass(slots=True)
class UnitClock:
    """Marks of micro-batches, in order: when the model begins (``start``) and comes to the first block (``embedded``),
    the forward of each block (``in``, ``out``), when the model goes on after the last one (``head``), when it ends
    (``end``), the backward of each block (``backward``), and the gradient of what it was given (``done``).

    Micro-batches may take turns in each block: then a turn ends with a mark of the next one.
    """

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    device: torch.device
    marks: list[tuple[str, str, Any]] = field(default_factory=list)  # seconds on a CPU, otherwise torch events
    _inside: int = 0  # how many forwards have begun and not ended; blocks run in backward again, too
    _nodes: list[tuple[str, Any]] = field(default_factory=list)  # backward of a block begins with these

    def mark(self, what: str, name: str = "") -> None:
        """Set a mark now."""
        self.marks.append((what, name, self._now()))

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        import torch

        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager around forward and backward of micro-batches. Forwards without gradients are not timed."""
        self.marks.clear()
        first, *_, last = [*self.blocks, *self.blocks]
        with ExitStack() as hooks:

            def keep(handle: Any) -> None:
                hooks.callback(handle.remove)

            keep(self.model.register_forward_pre_hook(self._start))
            keep(
                self.blocks[first].register_forward_pre_hook(partial(self._if_inside, "embedded", first), prepend=True)
            )
            for name, block in self.blocks.items():
                keep(block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                keep(block.register_forward_hook(partial(self._leave, name), prepend=True))
            keep(self.blocks[last].register_forward_hook(partial(self._if_inside, "head", last)))
            keep(self.model.register_forward_hook(self._end))
            yield

    def _start(self, *_: Any) -> None:
        import torch

        if torch.is_grad_enabled():
            self._inside += 1
            self.mark("start")

    def _end(self, *_: Any) -> None:
        """After the memory engine's hooks at the nodes, which wait for weights."""
        import torch

        if torch.is_grad_enabled():
            self._inside -= 1
            for name, node in self._nodes:
                node.register_prehook(partial(lambda name, grads: self.mark("backward", name), name))
            self._nodes.clear()
            self.mark("end")

    def _if_inside(self, what: str, name: str, *_: Any) -> None:
        if self._inside:
            self.mark(what, name)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        from deepstow.strategies.engine.tensors.nested import tensors_in

        if self._inside:
            inputs = (each for each in tensors_in((args, kwargs)) if each.requires_grad and each.is_floating_point())
            if (first := next(inputs, None)) is not None:
                first.register_hook(lambda grad: self.mark("done", name))
            self.mark("in", name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        from deepstow.strategies.engine.tensors.nested import tensors_in

        if self._inside:
            self.mark("out", name)
            nodes = ((name, tensor.grad_fn) for tensor in tensors_in(output) if tensor.grad_fn is not None)
            self._nodes += [first] if (first := next(nodes, None)) is not None else []

    def seconds(self) -> UnitTimes | None:
        """The mean of each time over micro-batches; None if what was marked is not forward and backward of blocks."""
        spans: dict[str, list[float]] = {mark: [] for mark in SPANS}
        for (mark, _, since), (following, _, until) in pairwise(self.marks):
            if following in SPANS.get(mark, ()):
                spans[mark].append(self._between(since, until))
        if not all(spans.values()):
            return None
        # Heads may come back together, after the last of them has ended.
        ends = sum(mark == "end" for mark, _, _ in self.marks)
        first, forward, backward, head = (fmean(spans[mark]) for mark in ("start", "in", "backward", "head"))
        return UnitTimes((first, LEAST), (forward, backward), (head, sum(spans["end"]) / ends), "")

    def _between(self, since: Any, until: Any) -> float:
        if self.device.type != "cpu":
            since.synchronize()
            until.synchronize()
        seconds: float = until - since if self.device.type == "cpu" else since.elapsed_time(until) / 1000
        return max(LEAST, seconds)


def median_of(found: Sequence[UnitTimes], of: Callable[[Sequence[float]], float] = statistics.median) -> UnitTimes:
    """The median, or what ``of`` says, of each of the times; ``found`` must not be empty."""

    def each(kind: UnitKind) -> tuple[float, float]:
        forward, backward = zip(*(times.of(kind) for times in found), strict=True)
        return of(forward), of(backward)

    return UnitTimes(each(UnitKind.EMBEDDING), each(UnitKind.BLOCK), each(UnitKind.HEAD), found[0].origin)


def without_again(found: UnitTimes, facts: Facts) -> UnitTimes:
    """``found`` without the recomputation in backward, as counted in ``facts``."""
    rates = facts.machine.rates
    blocks = [unit for unit in facts.units if unit.kind is UnitKind.BLOCK]
    if rates is None or not blocks:
        return found
    again_s = sum(rates.seconds(unit.again, facts.run.precision) for unit in blocks) / len(blocks)
    forward, backward = found.block
    again_s += forward if facts.run.recomputes else 0.0
    return replace(found, block=(forward, max(LEAST, backward - again_s)))


def key_of(facts: Facts) -> dict[str, Any]:
    """What the times are valid for."""
    run = facts.run
    # The saved bytes tell attention kernels apart.
    units = [[unit.name, unit.num_params, unit.num_trainable, unit.saved_bytes] for unit in facts.units]
    job = {"micro_batch": run.micro_batch, "tokens": run.sequence, "precision": run.precision.value}
    return {"units": units, **job, "device": facts.machine.name}


def store(folder: Path, facts: Facts, found: UnitTimes | None = None) -> None:
    """Write ``facts`` and the times ``found``; with None those in the file are kept if they are valid for ``facts``."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = found or read(folder, facts)
    content = {**to_jsonable_python(facts), "for": key_of(facts), "measured": asdict(measured) if measured else None}
    replace_file(folder / FILE, json.dumps(content, indent=1))


def read(folder: Path, facts: Facts, entry: str = "measured") -> UnitTimes | None:
    """Times in ``folder`` valid for ``facts``: those ``measured``, or the ``unit_times`` that a plan was made with."""
    try:
        content = json.loads((folder / FILE).read_text())
        values = content[entry]
        if values is None or content["for"] != key_of(facts):
            return None
        return TIMES.validate_python(values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def unused(folder: Path, facts: Facts) -> str:
    """A line about measured times in ``folder`` that are of other rows than those of ``facts``, of the same model on
    the same device; empty if it has none such.
    """
    try:
        content = json.loads((folder / FILE).read_text())
        stored, planned = content["for"], key_of(facts)
        alike = [unit[:3] for unit in stored["units"]] == [unit[:3] for unit in planned["units"]]
        if content["measured"] is None or stored == planned or not alike or stored["device"] != planned["device"]:
            return ""
        which = f"{int(stored['tokens'])} tokens where this run has {facts.run.sequence}, or of another mask or batch"
        return f"block times in {folder / FILE} are of rows of {which}: they are not used"
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def lines(facts: Facts, found: UnitTimes) -> Iterator[str]:
    """Measured times next to counted ones, one line for each kind of unit."""
    rates = facts.machine.rates
    for kind in UnitKind:
        index = next((i for i, unit in enumerate(facts.units) if unit.kind is kind), None)
        if index is None:
            continue
        times, counted = found.of(kind), ("", "")
        if rates is not None:
            times = unit_seconds(replace(facts, unit_times=found), rates)[index]
            by_rates = unit_seconds(replace(facts, unit_times=None), rates)[index]
            counted = f" (counted {1e3 * by_rates[0]:.3g})", f" (counted {1e3 * by_rates[1]:.3g})"
        forward, backward = (f"{1e3 * seconds:.3g} ms{by}" for seconds, by in zip(times, counted, strict=True))
        yield f"  {kind.value:<9}  forward {forward}, backward {backward}"


def measure(
    make: Callable[[int], nn.Module],
    facts: Facts,
    device: Any,
    say: Callable[[str], None],
    chunks: Sequence[int] = (1,),
) -> UnitTimes | None:
    """Run a few blocks of the model, which ``make`` builds with so many on the CPU, forward and backward on ``device``
    in the dtype of compute; the fastest of each. ``chunks``: numbers of equal parts of the rows, 1 among them.
    """
    import torch

    from deepstow.strategies.engine.forward.blocks import find_blocks

    model: Any = make(BLOCKS)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(facts.run.precision.value, torch.float32)
    model.to(device=device, dtype=dtype)
    model.train()
    clock = UnitClock(model, find_blocks(model), torch.device(device))
    vocabulary = min(model.get_input_embeddings().weight.shape[0], 1 << 15)
    measured = dict[int, list[UnitTimes]]()
    for parts in chunks:
        rows = facts.run.micro_batch // parts
        ids = torch.randint(vocabulary, (rows, facts.run.sequence), device=device)
        for number in range(ROUNDS + 1):  # the first warms up
            began = time.perf_counter()
            with clock.timing():
                model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)
            if clock.device.type != "cpu":
                torch.accelerator.synchronize(device)
            what = (
                f"{BLOCKS} blocks" if len(chunks) == 1 else f"{BLOCKS} blocks of {rows} of {facts.run.micro_batch} rows"
            )
            say(f"measuring {what}, round {number} of {ROUNDS}: {time.perf_counter() - began:.2f} s")
            seconds = clock.seconds()
            if number and seconds is not None:
                measured.setdefault(parts, []).append(seconds)
    if not measured:
        return None
    fastest = {parts: median_of(times, min) for parts, times in measured.items()}
    tables = {parts: times.block for parts, times in fastest.items()} if len(chunks) > 1 else {}
    return replace(fastest[1], origin=f"measured, {BLOCKS} blocks by themselves", chunks=tables)
