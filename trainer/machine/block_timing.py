"""How long each unit computes, measured: a few blocks before a run, or all of them in the second step of one.

Marks stand at the borders of blocks, behind the memory engine's own hooks, so that waiting for weights is in nobody's
time: on an accelerator they are events in the stream of compute, on a CPU the clock. Forward of a block lies between
its hooks; its backward between the node that made its output and the gradient of its input. What lies before the first
block and after the last is embedding and head. What backward computes again is taken off as counted, since a plan may
choose to compute less or more again.

What was measured is in ``facts.json`` of the run folder, under ``measured``, and holds for the same units, micro-batch,
sequence, precision and device. The next fresh run is planned with it. A plan never changes inside a run, so a resumed
one takes what its plan was made with: ``unit_times`` in the same file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.commit import replace_file
from strategies.core.facts import Facts, UnitKind, UnitTimes
from strategies.planner.step_cost import unit_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FILE = "facts.json"
BLOCKS, ROUNDS = 3, 3  # how many blocks are run by themselves, and how often
LEAST = 1e-9  # seconds; a unit that takes no time would divide by zero
Mark = Any  # seconds, or a torch.Event


@dataclass(slots=True)
class UnitClock:
    """Marks of one micro-batch, by name: ``start``, ``in``/``out`` of each block, ``end``, ``back`` and ``done``.

    Attributes:
        device: where the blocks compute.
    """

    blocks: Mapping[str, nn.Module]
    device: torch.device
    marks: dict[tuple[str, str], Mark] = field(default_factory=dict)
    _in_forward: bool = False

    @property
    def accelerated(self) -> bool:
        """Marks are events of the device, which may be far behind the host."""
        return self.device.type != "cpu"

    def mark(self, what: str, name: str = "") -> None:
        """Now; the first of its name counts, a recomputed forward does not."""
        if self.accelerated:
            import torch

            event = torch.Event(device=self.device, enable_timing=True)
            event.record()
            self.marks.setdefault((what, name), event)
        else:
            self.marks.setdefault((what, name), time.perf_counter())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward of one micro-batch runs inside."""
        self.marks.clear()
        handles = [
            hook
            for name, block in self.blocks.items()
            for hook in (
                block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                block.register_forward_hook(partial(self._leave, name)),
            )
        ]
        self._in_forward = True
        self.mark("start")
        try:
            yield
        finally:
            self.mark("end")
            self._in_forward = False
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        from strategies.engine.tensors.nested import tensors_in

        if self._in_forward:
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and tensor.is_floating_point():
                    tensor.register_hook(partial(self._reached, "done", name))
                    break
            self.mark("in", name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        from strategies.engine.tensors.nested import tensors_in

        if self._in_forward:
            self.mark("out", name)
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda grads, name=name: self.mark("back", name))
                    break

    def _reached(self, what: str, name: str, grad: Tensor) -> None:
        self.mark(what, name)

    def seconds(self) -> UnitTimes | None:
        """What the marks say; None, where backward did not pass all of them."""
        names = list(self.blocks)
        between = self._between
        if self.accelerated:
            for event in self.marks.values():
                event.synchronize()
        forward = [between(("in", name), ("out", name)) for name in names]
        backward = [between(("back", name), ("done", name)) for name in names]
        head = (between(("out", names[-1]), ("end", "")), between(("end", ""), ("back", names[-1])))
        first = between(("start", ""), ("in", names[0]))
        if None in forward or None in head or first is None:
            return None
        passed = [seconds for seconds in backward if seconds is not None]  # nothing asks for the first block's input,
        if not passed:  # where the embedding is frozen
            return None
        block = (sum(s for s in forward if s) / len(names), sum(passed) / len(passed))
        return UnitTimes((first, LEAST), block, (head[0] or LEAST, head[1] or LEAST), "")

    def _between(self, start: tuple[str, str], end: tuple[str, str]) -> float | None:
        first, last = self.marks.get(start), self.marks.get(end)
        if first is None or last is None:
            return None
        seconds: float = first.elapsed_time(last) / 1000 if self.accelerated else last - first
        return max(LEAST, seconds)


def without_again(found: UnitTimes, facts: Facts) -> UnitTimes:
    """``found`` without what backward computed again under ``facts``."""
    rates = facts.machine.rates
    blocks = [unit for unit in facts.units if unit.kind is UnitKind.BLOCK]
    if rates is None or not blocks:
        return found
    again = sum(rates.seconds(unit.again, facts.run.precision) for unit in blocks) / len(blocks)
    forward, backward = found.block
    again += forward if facts.run.recomputes else 0.0
    return replace(found, block=(forward, max(LEAST, backward - again)))


def key_of(facts: Facts) -> dict[str, Any]:
    """What timings hold for."""
    run = facts.run
    return {
        # Another attention kernel saves other tensors.
        "units": [[unit.name, unit.num_params, unit.num_trainable, unit.saved_bytes] for unit in facts.units],
        "micro_batch": run.micro_batch,
        "sequence": run.sequence,
        "precision": run.precision.value,
        "device": facts.machine.name,
    }


def store(folder: Path, facts: Facts, found: UnitTimes | None = None) -> None:
    """Write ``facts`` and what was ``found`` for them; None keeps what was found before, if it holds for them."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = found or read(folder, facts)
    content = {**facts.to_json(), "for": key_of(facts), "measured": asdict(measured) if measured else None}
    replace_file(folder / FILE, json.dumps(content, indent=1))


def read(folder: Path, facts: Facts, entry: str = "measured") -> UnitTimes | None:
    """Times in ``folder`` that hold for ``facts``: those ``measured``, or the ``unit_times`` a plan was made with."""
    try:
        content = json.loads((folder / FILE).read_text())
        values = content[entry]
        if values is None or content["for"] != key_of(facts):
            return None
        pairs = {name: (float(values[name][0]), float(values[name][1])) for name in ("embedding", "block", "head")}
        return UnitTimes(**pairs, origin=str(values["origin"]))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def lines(facts: Facts, found: UnitTimes) -> Iterator[str]:
    """Measured against counted, for people."""
    rates = facts.machine.rates
    counted = unit_seconds(replace(facts, unit_times=None), rates) if rates else []
    measured = unit_seconds(replace(facts, unit_times=found), rates) if rates else []
    for kind in UnitKind:
        index = next((i for i, unit in enumerate(facts.units) if unit.kind is kind), None)
        if index is None:
            continue
        if not counted:
            forward, backward = found.of(kind)
            yield f"  {kind.value:<9}  forward {1e3 * forward:.3g} ms, backward {1e3 * backward:.3g} ms"
            continue
        (forward, backward), (would, would_back) = measured[index], counted[index]
        yield (
            f"  {kind.value:<9}  forward {1e3 * forward:.3g} ms (counted {1e3 * would:.3g}), "
            f"backward {1e3 * backward:.3g} ms (counted {1e3 * would_back:.3g})"
        )


def measure(
    make: Callable[[int], nn.Module], facts: Facts, device: Any, say: Callable[[str], None]
) -> UnitTimes | None:
    """Run a few blocks of the model forward and backward on ``device``, in the dtype of compute; the fastest of each.

    Args:
        make: builds the model with so many blocks, on the CPU.
        say: called with a line of progress.
    """
    import torch

    from trainer.model.counting import find_blocks

    model: Any = make(BLOCKS)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(facts.run.precision.value, torch.float32)
    model.to(device=device, dtype=dtype)
    model.train()
    clock = UnitClock(find_blocks(model), torch.device(device))
    rows = min(model.get_input_embeddings().weight.shape[0], 1 << 15)
    ids = torch.randint(rows, (facts.run.micro_batch, facts.run.sequence), device=device)
    found: list[UnitTimes] = []
    for number in range(ROUNDS + 1):  # the first warms up
        began = time.perf_counter()
        with clock.forward():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        if clock.accelerated:
            torch.accelerator.synchronize(device)
        say(f"measuring {BLOCKS} blocks, round {number} of {ROUNDS}: {time.perf_counter() - began:.2f} s")
        seconds = clock.seconds()
        if number and seconds is not None:
            found.append(seconds)
    if not found:
        return None
    best = {
        name: (min(getattr(one, name)[0] for one in found), min(getattr(one, name)[1] for one in found))
        for name in ("embedding", "block", "head")
    }
    return UnitTimes(**best, origin=f"measured, {BLOCKS} blocks by themselves")
