"""Measured compute time of each unit: of a few blocks before a run, or of all of them in its first steps.

Marks are set at the borders of blocks, after the memory engine's own hooks, so that no unit's time includes waiting
for weights. A block's backward lies between the node that made its output and the gradient of its input; what lies
before the first block and after the last is embedding and head. Recomputation in backward is subtracted as counted.

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
from pathlib import Path
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


@dataclass(slots=True)
class UnitClock:
    """Marks of one micro-batch, by name: ``start``, ``in``/``out`` of each block, ``end``, ``back`` and ``done``."""

    blocks: Mapping[str, nn.Module]
    device: torch.device
    marks: dict[tuple[str, str], Any] = field(default_factory=dict)  # seconds on a CPU, otherwise torch events

    def mark(self, what: str, name: str = "") -> None:
        """Set a mark now, unless there is one of this name already."""
        if self.device.type == "cpu":
            self.marks.setdefault((what, name), time.perf_counter())
            return
        import torch

        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        self.marks.setdefault((what, name), event)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager around the forward of one micro-batch; its backward runs later, outside."""
        self.marks.clear()
        with ExitStack() as hooks:
            for name, block in self.blocks.items():
                hooks.callback(block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(partial(self._leave, name)).remove)
            hooks.callback(self.mark, "end")  # before the hooks are removed
            self.mark("start")
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        from deepstow.strategies.engine.tensors.nested import tensors_in

        inputs = (each for each in tensors_in((args, kwargs)) if each.requires_grad and each.is_floating_point())
        if (first := next(inputs, None)) is not None:
            first.register_hook(lambda grad: self.mark("done", name))
        self.mark("in", name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        from deepstow.strategies.engine.tensors.nested import tensors_in

        self.mark("out", name)
        nodes = (tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None)
        if (first := next(nodes, None)) is not None:
            first.register_prehook(lambda grads: self.mark("back", name))

    def seconds(self) -> UnitTimes | None:
        """The times between the marks; None if backward did not set the marks that are needed."""
        names, end = list(self.blocks), ("end", "")
        forward = [self._between(("in", name), ("out", name)) for name in names]
        backward = [self._between(("back", name), ("done", name)) for name in names]
        first = self._between(("start", ""), ("in", names[0]))
        head = self._between(("out", names[-1]), end), self._between(end, ("back", names[-1]))
        passed = [each for each in backward if each is not None]  # a frozen embedding's output needs no gradient
        if None in (*forward, *head, first) or not passed:
            return None
        block = sum(filter(None, forward)) / len(names), sum(passed) / len(passed)
        return UnitTimes((first or LEAST, LEAST), block, (head[0] or LEAST, head[1] or LEAST), "")

    def _between(self, start: tuple[str, str], end: tuple[str, str]) -> float | None:
        first, last = self.marks.get(start), self.marks.get(end)
        if first is None or last is None:
            return None
        if self.device.type != "cpu":
            first.synchronize()
            last.synchronize()
        seconds: float = last - first if self.device.type == "cpu" else first.elapsed_time(last) / 1000
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
    again = sum(rates.seconds(unit.again, facts.run.precision) for unit in blocks) / len(blocks)
    forward, backward = found.block
    again += forward if facts.run.recomputes else 0.0
    return replace(found, block=(forward, max(LEAST, backward - again)))


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
        there, here = content["for"], key_of(facts)
        alike = [unit[:3] for unit in there["units"]] == [unit[:3] for unit in here["units"]]
        if content["measured"] is None or there == here or not alike or there["device"] != here["device"]:
            return ""
        which = f"{int(there['tokens'])} tokens where this run has {facts.run.sequence}, or of another mask or batch"
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
    clock = UnitClock(find_blocks(model), torch.device(device))
    vocabulary = min(model.get_input_embeddings().weight.shape[0], 1 << 15)
    found = dict[int, list[UnitTimes]]()
    for many in chunks:
        rows = facts.run.micro_batch // many
        ids = torch.randint(vocabulary, (rows, facts.run.sequence), device=device)
        for number in range(ROUNDS + 1):  # the first warms up
            began = time.perf_counter()
            with clock.forward():
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad(set_to_none=True)
            if clock.device.type != "cpu":
                torch.accelerator.synchronize(device)
            what = (
                f"{BLOCKS} blocks" if len(chunks) == 1 else f"{BLOCKS} blocks of {rows} of {facts.run.micro_batch} rows"
            )
            say(f"measuring {what}, round {number} of {ROUNDS}: {time.perf_counter() - began:.2f} s")
            seconds = clock.seconds()
            if number and seconds is not None:
                found.setdefault(many, []).append(seconds)
    if not found:
        return None
    least = {many: median_of(times, min) for many, times in found.items()}
    tables = {many: times.block for many, times in least.items()} if len(chunks) > 1 else {}
    return replace(least[1], origin=f"measured, {BLOCKS} blocks by themselves", chunks=tables)
