"""Bytes of one rank under given degrees, stage by stage. With one stage and one tensor rank: the bytes of the plan.

In a pipeline, what forward saves of the other micro-batches in flight is there as well. Torch's pipeline trains plainly
under autocast, and allocates a buffer for every micro-batch that a stage receives, activations and gradients.

With offload this is an estimate, which places no buckets: the device has weights (or the largest unit and two blocks
twice, where they are fetched), the gradients that wait there, or two slots for the largest unit, and the peak of
forward and backward; the host has all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, TypeAlias

from deepstow.strategies.core.facts import Facts, Precision, RunFacts, Unit
from deepstow.strategies.core.layout import SCRATCH_ELEMENTS
from deepstow.strategies.core.peak import Saved, backward_peak, forward_peak
from deepstow.strategies.core.plan import Kind, Tier, When
from deepstow.strategies.planner import lossy
from deepstow.strategies.planner.activation_policy import WORTH_BYTES, by_policy
from deepstow.strategies.planner.cuts import Schedule
from deepstow.strategies.planner.engine_bytes import (
    SPLIT_FROM,
    buffers,
    element_bytes,
    live_elements,
    message_bytes,
    received_bytes,
)
from deepstow.strategies.planner.hybrid.degrees import Degrees, Model, Models, Part, Stowed
from deepstow.strategies.planner.network import slices_bytes
from deepstow.strategies.planner.overlap import rows_bytes

Chunked: TypeAlias = bool | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one rank: its device, and its part of the host."""

    device: int
    host: int


class Account:
    """Counts bytes. ``chunked``: what ``strategies.cross_entropy`` says; None: it is off, but offload brings it."""

    def __init__(self, models: Models, chunked: Chunked = None) -> None:
        self._models = models
        self._chunked = chunked
        self._saved_of: dict[object, list[Saved]] = {}

    def of(self, degrees: Degrees) -> Bytes:
        """The most that any stage needs of each memory."""
        model = self._models.of(degrees)
        # Of stages that hold the same, the first has the most micro-batches in flight.
        first: dict[object, tuple[int, Part]] = {}
        for index, part in enumerate(model.parts(degrees.stages)):
            first.setdefault(model.key(part), (index, part))
        stage_bytes = [self.of_stage(degrees, index, part) for index, part in first.values()]
        return Bytes(max(stage.device for stage in stage_bytes), max(stage.host for stage in stage_bytes))

    def of_stage(self, degrees: Degrees, stage: int, part: Part) -> Bytes:
        """The bytes of a rank of one ``stage``, which holds ``part``."""
        model = self._models.of(degrees)
        flying = Schedule.ONE_F_ONE_B.in_flight(stage, degrees.stages, degrees.micro_batches)
        peak, landing, waiting = self._passes(degrees, model, part)
        besides = (flying - 1) * waiting + self._received(degrees, stage, flying)
        runtime, run = model.facts.machine.runtime_host_bytes, model.facts.run
        from_others = slices_bytes(run) * (degrees.sequence > 1) + 2 * rows_bytes(run) * (degrees.experts > 1)
        if degrees.offload is not Stowed.NOTHING:
            return self._offloaded(degrees, model, part, peak + besides + from_others)
        runtime += _lossy(model.facts, degrees, Tier.HOST)
        standing, grads, at_step = self._states(degrees, model, part)
        standing += from_others
        if degrees.micro_batches > 1:  # then gradients of all units are there all along
            return Bytes(standing + grads + max(at_step, peak + besides), runtime)
        return Bytes(standing + max(grads + at_step, landing + besides), runtime)

    def _states(self, degrees: Degrees, model: Model, part: Part) -> tuple[int, int, int]:
        """Bytes that are always there, of gradients, and of the optimizer step."""
        plain, facts = self._models.plain(degrees), self._part(model, part)
        engine = () if plain else buffers(facts, degrees.zero, degrees.copies)
        by_when = [*_messages(facts, degrees)] if plain else [(reserve.when, reserve.num_bytes) for reserve in engine]
        sizes = {kind: state_bytes(facts.units, facts.run, degrees, kind, plain=plain) for kind in Kind}
        grads = sizes.pop(Kind.GRAD)
        always, at_step = (sum(size for when, size in by_when if when is moment) for moment in When)
        return always + sum(sizes.values()), grads, at_step

    def _part(self, model: Model, part: Part) -> Facts:
        """The facts of a part; of its units only states and buffers are read."""
        return replace(model.facts, units=model.units(part), params=())

    def _passes(self, degrees: Degrees, model: Model, part: Part) -> tuple[int, int, int]:
        """Of one micro-batch, the peak without gradients and with, and what waits between forward and backward."""
        kept = self._saved(degrees, model)[part.start : part.end]
        forward = forward_peak(kept)
        peak, landing = max(forward, backward_peak(kept, [0] * len(kept))), 0
        if degrees.micro_batches == 1:  # gradients land while saved tensors leave
            plain, run = self._models.plain(degrees), model.facts.run
            grads = [state_bytes([unit], run, degrees, Kind.GRAD, plain=plain) for unit in model.units(part)]
            landing = max(forward, backward_peak(kept, grads))
        return peak, landing, sum(saved.waiting for saved in kept)

    def _saved(self, degrees: Degrees, model: Model) -> list[Saved]:
        """What each unit of the whole model saves."""
        chunked = self._chunked
        if chunked is None and degrees.offload is not Stowed.NOTHING and degrees.tensor == 1:
            chunked = "auto"  # brought by offload, not where ranks divide the head
        key = (degrees.size, self._models.plain(degrees), degrees.recompute, chunked)
        if key not in self._saved_of:
            units = (unit.with_chunks() if in_chunks(unit, chunked) else unit for unit in model.facts.units)
            self._saved_of[key] = [by_policy(unit, degrees.recompute).saved for unit in units]
        return self._saved_of[key]

    def _received(self, degrees: Degrees, stage: int, flying: int) -> int:
        """Bytes of buffers for what the stages before and after send."""
        if degrees.stages == 1:
            return 0
        sides = (stage > 0) + (stage < degrees.stages - 1)
        count = degrees.micro_batches if self._models.torchs else flying
        return received_bytes(self._models.of(degrees).facts.run, sides, count)

    def _offloaded(self, degrees: Degrees, model: Model, part: Part, besides: int) -> Bytes:
        facts = self._part(model, part)
        size, mixed = facts.run.precision.element_bytes, facts.run.precision is not Precision.FP32
        shards = degrees.copies if degrees.zero else 1
        weights, trained = facts.num_params * size, facts.num_trainable
        share = ceil(trained / shards)
        largest = max((unit.num_trainable for unit in facts.units), default=0)
        host = 4 * share * (facts.run.moments + (mixed or degrees.zero > 0))
        summed = degrees.copies > 1 and degrees.micro_batches > 1  # over micro-batches, then over ranks: on the device
        device = size * trained if summed else 2 * size * largest
        device += size * largest * (degrees.zero > 0) + 4 * min(SCRATCH_ELEMENTS, largest) * mixed
        if degrees.offload is Stowed.STATE or degrees.micro_batches > 1:
            host += size * share  # gradients wait for the CPU's update; else they take the place of a weight's copy
        if degrees.offload is Stowed.WEIGHTS:
            moving = 2 * live_elements(facts) * size
            device += min(weights, moving)
            host += ceil(weights / shards)
        else:
            device += weights
        return Bytes(device + besides, host + facts.machine.runtime_host_bytes)


def in_chunks(unit: Unit, chunked: Chunked) -> bool:
    """Whether the loss of this head is computed by chunks, as ``strategies.cross_entropy`` decides."""
    if unit.in_chunks is None or not chunked:
        return False
    return chunked is True or 4 * unit.in_chunks.logits >= WORTH_BYTES


def state_bytes(units: Sequence[Unit], run: RunFacts, degrees: Degrees, kind: Kind, *, plain: bool = False) -> int:
    """Bytes of one kind of tensor, each unit's rounded up to whole elements per rank. ``plain``: as they are loaded,
    without masters, as in torch's pipeline, whose copies of a stage divide the optimizer's state under ZeRO 1.
    """
    shards = degrees.copies if degrees.zero >= SPLIT_FROM[kind] else 1
    if plain:
        trained = sum(unit.num_trainable for unit in units)
        frozen = sum(unit.num_params for unit in units) - trained
        times = {Kind.MASTER: 0, Kind.MOMENT: run.moments}.get(kind, 1)
        if kind is Kind.MOMENT:
            return run.trained_bytes * times * sum(-(-unit.num_trainable // shards) for unit in units)
        return run.trained_bytes * trained * times + run.frozen_bytes * frozen * (kind is Kind.PARAM)
    size = element_bytes(run, degrees.zero)[kind]
    return size * sum(-(-(unit.num_params if kind is Kind.PARAM else unit.num_trainable) // shards) for unit in units)


def _lossy(facts: Facts, degrees: Degrees, tier: Tier) -> int:
    """Of what a lossy exchange keeps."""
    reserves = () if degrees.exchange is None else lossy.reserves(degrees.exchanged(facts))
    return sum(reserve.num_bytes for reserve in reserves if reserve.tier is tier)


def _messages(facts: Facts, degrees: Degrees) -> Iterator[tuple[When, int]]:
    """What plain training, in a stage of torch's pipeline or with a lossy exchange, sets aside to sum gradients."""
    if degrees.exchange is not None:
        ddp = 0 if degrees.exchange.local_steps else facts.run.trained_bytes * facts.num_trainable
        yield When.ALWAYS, ddp + _lossy(facts, degrees, Tier.DEVICE)
    else:
        yield When.STEP, message_bytes(facts.run, facts.num_trainable, degrees.copies, shared=degrees.zero > 0)
