"""Bytes of one rank under given degrees, stage by stage. With one stage and one tensor rank: the bytes of the plan.

States are split by ZeRO over the data ranks as ``zero_bytes.py`` says, the peak along forward and backward is that of
``strategies/core/peak.py``, and both see the units of the part that the stage holds. In a pipeline, what forward saves
of the other micro-batches in flight is there as well, and torch's engine allocates a buffer for every micro-batch that
a stage receives, activations and gradients, at the start (torch.distributed.pipelining, 2.13).

With offload this is an estimate, since the planner of ``strategies.offload`` places buckets and this does not: the
device has weights (or the largest unit and two blocks twice, where they are fetched), the gradients that wait there, or
two slots for the largest unit, and the peak of forward and backward; the host has all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, TypeAlias

from strategies.core.facts import WORTH_BYTES, Facts, Precision, RunFacts, Unit
from strategies.core.layout import SCRATCH_ELEMENTS
from strategies.core.peak import Saved, backward_peak, forward_peak
from strategies.core.plan import Kind, When
from strategies.planner.activation_policy import by_policy
from strategies.planner.hybrid.degrees import Degrees, Stowed
from strategies.planner.hybrid.parts import Model, Part
from strategies.planner.hybrid.pipeline_clock import in_flight
from strategies.planner.zero_bytes import SPLIT_FROM, buffers, element_bytes, live_elements

Chunked: TypeAlias = bool | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one rank: its device, and its part of the host."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class _Passes:
    """Forward and backward of one micro-batch: the peak without gradients and with, and what waits between."""

    peak: int
    landing: int
    waiting: int


class Account:
    """Counts bytes, and remembers what it counted.

    Args:
        models: by micro-batch and tensor degree.
        chunked: what ``strategies.cross_entropy`` says; None: it is not in the config, and offload brings it.
        receives_all: a stage has a buffer for each micro-batch that it receives, not only for those in flight.
    """

    def __init__(
        self, models: Mapping[tuple[int, int], Model], *, chunked: Chunked = None, receives_all: bool = True
    ) -> None:
        self._models, self._chunked, self._receives_all = models, chunked, receives_all
        self._passes_of: dict[object, _Passes] = {}
        self._states_of: dict[object, tuple[int, int, int]] = {}
        self._facts_of: dict[object, Facts] = {}

    def of(self, degrees: Degrees) -> Bytes:
        """The most that any stage needs of each memory."""
        model = self._models[degrees.micro_batch, degrees.tensor]
        # Of stages that hold the same, the first has the most micro-batches in flight.
        first = dict[Part, tuple[int, Part]]()
        for index, part in enumerate(model.parts(degrees.stages, degrees.last_blocks)):
            first.setdefault(model.key(part), (index, part))
        found = [self.of_stage(degrees, index, part) for index, part in first.values()]
        return Bytes(max(each.device for each in found), max(each.host for each in found))

    def of_stage(self, degrees: Degrees, stage: int, part: Part) -> Bytes:
        """The bytes of a rank of one ``stage``, which holds ``part``."""
        model = self._models[degrees.micro_batch, degrees.tensor]
        flying = in_flight(stage, degrees.stages, degrees.micro_batches)
        passes = self._passes(degrees, model, part)
        besides = (flying - 1) * passes.waiting + self._received(degrees, stage, flying)
        runtime = model.facts.machine.runtime_host_bytes
        if degrees.offload is not Stowed.NOTHING:
            return self._offloaded(degrees, model, part, passes.peak + besides)
        standing, grads, at_step = self._states(degrees, model, part)
        if degrees.micro_batches > 1:  # then gradients of all units are there all along
            return Bytes(standing + grads + max(at_step, passes.peak + besides), runtime)
        return Bytes(standing + max(grads + at_step, passes.landing + besides), runtime)

    def _states(self, degrees: Degrees, model: Model, part: Part) -> tuple[int, int, int]:
        """Bytes that are always there, of gradients, and of the optimizer step."""
        key = (degrees.tensor, degrees.zero, degrees.data, model.key(part))
        if key not in self._states_of:
            facts = self._part(degrees, model, part)
            held = list(buffers(facts, degrees.zero, degrees.data))
            whole = sum(each.num_bytes for each in held if each.when is When.ALWAYS)
            whole += sum(state_bytes(facts.units, facts.run, degrees, kind) for kind in Kind if kind is not Kind.GRAD)
            grads = state_bytes(facts.units, facts.run, degrees, Kind.GRAD)
            self._states_of[key] = whole, grads, sum(each.num_bytes for each in held if each.when is When.STEP)
        return self._states_of[key]

    def _part(self, degrees: Degrees, model: Model, part: Part) -> Facts:
        """The facts of a part; of its units only states and buffers are read."""
        key = (degrees.tensor, model.key(part))
        if key not in self._facts_of:
            self._facts_of[key] = replace(model.facts, units=model.units(part), params=(), linears=())
        return self._facts_of[key]

    def _passes(self, degrees: Degrees, model: Model, part: Part) -> _Passes:
        # With one micro-batch gradients land while saved tensors leave; their bytes depend on ZeRO.
        shares = (degrees.zero >= SPLIT_FROM[Kind.GRAD] and degrees.data) if degrees.micro_batches == 1 else None
        chunked = self._chunked
        if chunked is None and degrees.offload is not Stowed.NOTHING:
            chunked = "auto"
        key = (degrees.micro_batch, degrees.tensor, degrees.recompute, chunked, shares, model.key(part))
        if key not in self._passes_of:
            units = [unit.with_chunks() if in_chunks(unit, chunked) else unit for unit in model.units(part)]
            kept = [by_policy(unit, degrees.recompute).saved for unit in units]
            run = model.facts.run
            none, grads = [0] * len(units), [state_bytes([unit], run, degrees, Kind.GRAD) for unit in units]
            forward = forward_peak(kept)
            landing = max(forward, backward_peak(kept, grads)) if shares is not None else 0
            peak = max(forward, backward_peak(kept, none))
            self._passes_of[key] = _Passes(peak, landing, _waiting(kept))
        return self._passes_of[key]

    def _received(self, degrees: Degrees, stage: int, flying: int) -> int:
        """Bytes of buffers for what the stages before and after send."""
        if degrees.stages == 1:
            return 0
        sides = (stage > 0) + (stage < degrees.stages - 1)
        count = degrees.micro_batches if self._receives_all else flying
        return sides * count * boundary_bytes(self._models[degrees.micro_batch, degrees.tensor].facts)

    def _offloaded(self, degrees: Degrees, model: Model, part: Part, besides: int) -> Bytes:
        facts = self._part(degrees, model, part)
        size, precision = facts.run.precision.element_bytes, facts.run.precision
        ways = degrees.data if degrees.zero else 1
        weights, trained = facts.num_params * size, facts.num_trainable
        share = ceil(trained / ways)
        largest = max((unit.num_trainable for unit in facts.units), default=0)
        host = 4 * share * (facts.run.moments + (precision is not Precision.FP32 or degrees.zero > 0))
        summed = (
            degrees.data > 1 and degrees.micro_batches > 1
        )  # over micro-batches, and then over ranks: on the device
        device = size * trained if summed else 2 * size * largest
        device += size * largest * (degrees.zero > 0) + 4 * min(SCRATCH_ELEMENTS, largest)
        if degrees.offload is Stowed.STATE or degrees.micro_batches > 1:
            host += (
                size * share
            )  # gradients that wait for the CPU's update; else they take the place of a weight's copy
        if degrees.offload is Stowed.WEIGHTS:
            moving = 2 * live_elements(facts) * size
            device += min(weights, moving)
            host += ceil(weights / ways)
        else:
            device += weights
        return Bytes(device + besides, host + facts.machine.runtime_host_bytes)


def in_chunks(unit: Unit, chunked: Chunked) -> bool:
    """Whether the loss of this head is computed by chunks, as ``strategies.cross_entropy`` decides."""
    if unit.in_chunks is None or not chunked:
        return False
    return chunked is True or 4 * unit.in_chunks.logits >= WORTH_BYTES


def boundary_bytes(facts: Facts) -> int:
    """Bytes of one micro-batch's hidden states, which stages send to each other."""
    run = facts.run
    return run.micro_batch * run.sequence * run.hidden_size * run.precision.element_bytes


def state_bytes(units: Sequence[Unit], run: RunFacts, degrees: Degrees, kind: Kind) -> int:
    """Bytes of one kind of tensor, each unit's rounded up to whole elements per rank."""
    size = element_bytes(run, degrees.zero)[kind]
    ways = degrees.data if degrees.zero >= SPLIT_FROM[kind] else 1
    return size * sum(-(-(unit.num_params if kind is Kind.PARAM else unit.num_trainable) // ways) for unit in units)


def _waiting(kept: list[Saved]) -> int:
    return sum(saved.waiting for saved in kept)
